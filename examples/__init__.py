"""Job specs that can be POSTed as they are, and the demo that posts one."""
