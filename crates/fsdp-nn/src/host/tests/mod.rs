//! Tests of the host backend through its public contracts.

mod agreement;
mod conformance;
mod storage;
