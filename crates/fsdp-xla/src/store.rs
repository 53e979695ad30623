//! The key-value store through which a plugin's processes exchange data, over the control plane of the run.
//!
//! A value is announced to all processes, which keep it until the end. Plugins exchange few and small values, most of
//! them when their clients are created: which devices each process has, and how to connect to each other.

use std::sync::Arc;
use std::time::Duration;

use fsdp_comm::assembly::{Assembly, AssemblyError};
use fsdp_comm::process::launch::Scoped;

/// The keys and values of one plugin client, the same in all processes.
pub(crate) struct Store {
    topics: Scoped,
}

/// Why there is no value, in terms of the API.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct StoreError {
    /// A `PJRT_Error_Code`.
    pub(crate) code: i32,
    pub(crate) message: String,
}

/// `PJRT_Error_Code`: no process has set the key in time.
pub(crate) const DEADLINE_EXCEEDED: i32 = 4;
/// `PJRT_Error_Code`: no process has set the key yet.
pub(crate) const NOT_FOUND: i32 = 5;
/// `PJRT_Error_Code`: the other processes can no longer be reached.
pub(crate) const UNAVAILABLE: i32 = 14;

impl Store {
    /// Creates a store over an assembly of all processes in which keys have no other user.
    pub(crate) fn new(assembly: &Arc<dyn Assembly>) -> Self {
        Self { topics: Scoped::new(assembly, "key") }
    }

    /// Sets the value of a key; later values are ignored.
    ///
    /// # Errors
    /// The world has failed.
    pub(crate) fn put(&self, key: &[u8], value: Vec<u8>) -> Result<(), StoreError> {
        let failed = |error| StoreError { code: UNAVAILABLE, message: format!("{error}") };
        self.topics.announce(&topic(key), value).map_err(failed)
    }

    /// Waits for the value of a key.
    ///
    /// # Errors
    /// No process has set it within the limit, or the world has failed.
    pub(crate) fn get(&self, key: &[u8], limit: Duration) -> Result<Vec<u8>, StoreError> {
        self.topics.hear(&topic(key), limit).map_err(|error| match error {
            AssemblyError::Late { .. } => {
                let (key, seconds) = (topic(key), limit.as_secs_f64());
                let message = format!("no process has set the plugin's key \"{key}\" within {seconds} s");
                StoreError { code: DEADLINE_EXCEEDED, message }
            }
            AssemblyError::GivenUp | AssemblyError::Failed(_) => {
                StoreError { code: UNAVAILABLE, message: error.to_string() }
            }
        })
    }

    /// Returns the value of a key that is already set.
    ///
    /// # Errors
    /// It is not set yet, or the world has failed.
    pub(crate) fn try_get(&self, key: &[u8]) -> Result<Vec<u8>, StoreError> {
        self.get(key, Duration::ZERO).map_err(|error| match error.code {
            DEADLINE_EXCEEDED => StoreError {
                code: NOT_FOUND,
                message: format!("the plugin's key \"{}\" has no value yet", topic(key)),
            },
            _ => error,
        })
    }
}

/// Converts a key, which is bytes, to a topic, which is text.
fn topic(key: &[u8]) -> String {
    key.escape_ascii().to_string()
}

#[cfg(test)]
mod tests {
    use fsdp_comm::assembly::InMemoryAssembly;
    use fsdp_core::Rank;
    use fsdp_core::comm::CommError;

    use super::*;

    #[test]
    fn value_is_found_only_under_its_key_after_put() {
        let assembly: Arc<dyn Assembly> = Arc::new(InMemoryAssembly::new(2));
        let store = Store::new(&assembly);
        assert_eq!(store.try_get(b"a").unwrap_err().code, NOT_FOUND);
        store.put(b"a", vec![0, 255]).unwrap();
        store.put(b"\xff", Vec::new()).unwrap();
        assert_eq!(store.get(b"a", Duration::from_secs(60)), Ok(vec![0, 255]));
        assert_eq!(store.try_get(b"\xff"), Ok(Vec::new()));
        let late = store.get(b"b", Duration::from_millis(10)).unwrap_err();
        assert_eq!(late.code, DEADLINE_EXCEEDED);
        assert_eq!(late.message, "no process has set the plugin's key \"b\" within 0.01 s");
    }

    #[test]
    fn get_is_unavailable_after_world_failure() {
        let world = Arc::new(InMemoryAssembly::new(2));
        let assembly: Arc<dyn Assembly> = Arc::clone(&world) as _;
        world.lose(Rank(0), CommError::PeerFailed { rank: Rank(0), reason: "it was killed".to_owned() });
        let lost = Store::new(&assembly).get(b"a", Duration::from_secs(60)).unwrap_err();
        assert_eq!(lost.code, UNAVAILABLE);
        assert!(lost.message.contains("it was killed"), "{}", lost.message);
    }
}
