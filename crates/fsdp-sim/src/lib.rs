//! Ranks as threads: in-process worlds, the simulated communicator, adversarial queues, faults.
