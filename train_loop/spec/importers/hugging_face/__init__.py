"""The files of Hugging Face's tools: TrainingArguments, DistributedConfig, Accelerate and TRL."""
