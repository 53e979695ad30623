//! Proves a schedule safe before any byte moves.

/// Why a schedule is unsafe.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Violation(pub String);
