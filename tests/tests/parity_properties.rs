//! Every promise of `verify`, for random models, sizes, policies, dtypes, meshes and issue orders.
//!
//! A failure prints the smallest case as a model and overrides. Its seed is written to
//! `parity_properties.proptest-regressions` beside this file, to be committed; the same test replays it first.

use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;

use crate::parity_case::cases;

const REPLAY: &str = "replay: cargo test -p fsdp-tests --test tests parity_properties";

/// `cases` cases, or as many as `PROPTEST_CASES` says.
fn config(cases: u32) -> ProptestConfig {
    let persistence = FileFailurePersistence::WithSource("proptest-regressions");
    let defaults = ProptestConfig::default();
    ProptestConfig {
        cases: std::env::var_os("PROPTEST_CASES").map_or(cases, |_| defaults.cases),
        failure_persistence: Some(Box::new(persistence)),
        max_shrink_iters: 400,
        ..defaults
    }
}

proptest! {
    #![proptest_config(config(400))]

    #[test]
    fn sharded_training_keeps_every_promise(case in cases()) {
        let result = case.verify(2);
        prop_assert!(result.is_ok(), "{}\n{REPLAY}", result.unwrap_err());
    }
}
