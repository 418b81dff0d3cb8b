"""Sinks for a run's metrics: TensorBoard, MLflow and Weights & Biases.

The driver reads the metrics that rank 0 has written and sends them to the sinks in separate threads. Sinks never block
a rank, and a failing sink never fails the run.
"""
