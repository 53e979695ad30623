//! Identifies the start of a run to which a save belongs.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::seal::parse_digits;

/// A random number that identifies one start of a run. The process of rank 0 draws it when it takes over the directory,
/// and sends it to the other ranks.
///
/// The name of everything incomplete contains it. Processes of an earlier start that are still alive therefore write
/// next to the files of this one, and never into them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attempt(u64);

impl Attempt {
    /// Draws a new attempt.
    pub(super) fn draw() -> Attempt {
        // The standard library seeds its hashers from the operating system.
        let seed = std::collections::hash_map::RandomState::new();
        Attempt(std::hash::BuildHasher::hash_one(&seed, std::process::id()))
    }

    /// Parses the name of an attempt. `None` if it is not one.
    pub(crate) fn named(name: &str) -> Option<Attempt> {
        parse_digits(name.as_bytes()).map(Attempt)
    }
}

/// Returns the name of a file without the prefix of its attempt.
pub(super) fn plain_name(name: &str) -> &str {
    match name.split_once('/') {
        Some((attempt, plain)) if Attempt::named(attempt).is_some() => plain,
        _ => name,
    }
}

impl fmt::Display for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl Serialize for Attempt {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Attempt {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Attempt, D::Error> {
        let text = String::deserialize(deserializer)?;
        Attempt::named(&text)
            .ok_or_else(|| serde::de::Error::custom("expected 16 lower-case hexadecimal digits"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attempts_are_unique_and_round_trip_as_names() {
        let drawn: std::collections::BTreeSet<String> =
            (0..100).map(|_| Attempt::draw().to_string()).collect();
        assert_eq!(drawn.len(), 100);
        for name in &drawn {
            assert_eq!(Attempt::named(name).map(|attempt| attempt.to_string()).as_ref(), Some(name));
            let told = serde_json::to_string(&Attempt::named(name).unwrap()).unwrap();
            assert_eq!(serde_json::from_str::<Attempt>(&told).unwrap().to_string(), *name);
        }
        assert_eq!(Attempt::named("tmp"), None);
    }
}
