"""One thread: the networks are small, and how many threads add up changes last digits."""

import torch as th

th.set_num_threads(1)
