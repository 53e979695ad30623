//! Every promise of `verify`, for random models, sizes, policies, dtypes, meshes and issue orders, with ranks as
//! threads and over TCP.
//!
//! A failure prints the smallest case as a model and overrides, and a command that replays it on any machine. Its
//! seed is also written to `parity_properties.proptest-regressions` next to this file, to be committed; the test
//! replays the seeds of that file first.

use std::any::Any;
use std::fmt::Debug;

use proptest::prelude::*;
use proptest::test_runner::{FailurePersistence, FileFailurePersistence, PersistedSeed};

use crate::over_tcp::OverTcp;
use crate::parity_case::cases;

/// The environment variable with a seed to replay.
const SEED: &str = "PARITY_SEED";

/// Seeds to replay: one requested by the environment, then those of the regressions file. Prints each new seed as a
/// command.
#[derive(Clone, Debug, PartialEq)]
struct Replay {
    requested: Option<PersistedSeed>,
    file: FileFailurePersistence,
}

impl Replay {
    /// Reads the requested seed, if any, from the environment.
    fn from_environment(file: FileFailurePersistence) -> Self {
        let read = |seed: String| seed.parse().unwrap_or_else(|()| panic!("{SEED}='{seed}' is not a seed"));
        Self { requested: std::env::var(SEED).ok().map(read), file }
    }
}

/// Returns the command that replays a seed.
fn command(seed: &PersistedSeed) -> String {
    format!("{SEED}='{seed}' cargo test -p fsdp-tests --test tests parity_properties")
}

impl FailurePersistence for Replay {
    fn load_persisted_failures2(&self, source_file: Option<&'static str>) -> Vec<PersistedSeed> {
        let kept = self.file.load_persisted_failures2(source_file);
        self.requested.iter().cloned().chain(kept).collect()
    }

    fn save_persisted_failure2(
        &mut self,
        source_file: Option<&'static str>,
        seed: PersistedSeed,
        shrunken_value: &dyn Debug,
    ) {
        eprintln!("replay with: {}", command(&seed));
        self.file.save_persisted_failure2(source_file, seed, shrunken_value);
    }

    fn box_clone(&self) -> Box<dyn FailurePersistence> {
        Box::new(self.clone())
    }

    fn eq(&self, other: &dyn FailurePersistence) -> bool {
        other.as_any().downcast_ref::<Self>().is_some_and(|other| self == other)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Configures `cases` cases, or the number in `PROPTEST_CASES`.
fn config(cases: u32) -> ProptestConfig {
    let file = FileFailurePersistence::WithSource("proptest-regressions");
    let defaults = ProptestConfig::default();
    ProptestConfig {
        cases: std::env::var_os("PROPTEST_CASES").map_or(cases, |_| defaults.cases),
        failure_persistence: Some(Box::new(Replay::from_environment(file))),
        max_shrink_iters: 400,
        ..defaults
    }
}

proptest! {
    #![proptest_config(config(400))]

    #[test]
    fn sharded_training_passes_verification(case in cases()) {
        let result = case.verify(2);
        prop_assert!(result.is_ok(), "{}", result.unwrap_err());
    }
}

proptest! {
    #![proptest_config(config(300))]

    #[test]
    fn sharded_training_over_tcp_passes_verification(case in cases(), ranks_per_process in 1usize..3) {
        let result = case.verify_on(&OverTcp { ranks_per_process }, 2);
        prop_assert!(result.is_ok(), "{}", result.unwrap_err());
    }
}

mod replay {
    use std::sync::Mutex;

    use proptest::test_runner::{MapFailurePersistence, TestRunner};

    use super::*;

    /// Runs a property that fails for some numbers, and returns the runner and the first number that failed.
    fn failing(persistence: Box<dyn FailurePersistence>) -> (TestRunner, u64) {
        let mut runner = TestRunner::new(ProptestConfig {
            failure_persistence: Some(persistence),
            source_file: Some("replayed.rs"),
            max_shrink_iters: 0,
            ..ProptestConfig::default()
        });
        let failed = Mutex::new(None);
        let result = runner.run(&any::<u64>(), |number| {
            if number % 50 == 3 {
                failed.lock().unwrap().get_or_insert(number);
            }
            prop_assert!(number % 50 != 3);
            Ok(())
        });
        assert!(result.is_err());
        let failed = failed.into_inner().unwrap();
        (runner, failed.expect("a number failed"))
    }

    #[test]
    fn printed_command_replays_first_failing_seed() {
        let (runner, failed) = failing(Box::new(MapFailurePersistence::default()));
        let kept = runner.config().failure_persistence.as_ref().unwrap();
        let kept = kept.as_any().downcast_ref::<MapFailurePersistence>().unwrap();
        let printed = command(kept.map["replayed.rs"].first().unwrap());
        let seed = printed.split('\'').nth(1).unwrap().parse().unwrap();
        let replay = Replay { requested: Some(seed), file: FileFailurePersistence::Off };
        assert_eq!(failing(Box::new(replay)).1, failed);
    }
}
