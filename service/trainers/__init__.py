"""What the tasks of a training job know of each other, and how all of them get one dataset.

`context.py` reads who this process is from its environment, without any framework; `across.py`
has the one call by which the chief registers a dataset and all tasks read it, with TensorFlow.
"""
