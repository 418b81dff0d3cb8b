"""Rules between the parts of a job: settings that do not go with those of another part."""
