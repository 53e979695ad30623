//! Data, configuration, trainer, metrics, oracle and verification.
