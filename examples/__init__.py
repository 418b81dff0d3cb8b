"""Job specs for `POST /jobs`, and the demo that submits one."""
