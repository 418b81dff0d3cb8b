"""Where the metrics of a run are shown besides the run directory: TensorBoard, MLflow, Weights & Biases.

The driver reads what rank 0 has written and hands it over, in threads of its own: no rank waits for a sink, and no run
ends by one.
"""
