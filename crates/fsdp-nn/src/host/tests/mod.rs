//! Tests of the host backend through its public contracts.

mod agreement;
mod chunks;
mod conformance;
mod storage;
