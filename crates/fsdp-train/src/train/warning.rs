//! Warnings that do not end a run.

use std::collections::BTreeSet;
use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;

use fsdp_data::DataWarning;

use super::divergence::Exploded;
use crate::rule::LateParams;

/// A condition that the user should know, and despite which the run continues.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum RunWarning {
    /// The file system of the output folder has no locks.
    NoLocks {
        /// The output folder.
        out_dir: PathBuf,
    },
    /// A checkpoint was skipped because it cannot be read completely.
    PassedOver {
        /// The checkpoint.
        path: PathBuf,
        /// What is wrong with it.
        fault: String,
    },
    /// The optimizer of another trainer had counted fewer steps for some parameters than for the others, or none.
    LateParams {
        /// The checkpoint.
        path: PathBuf,
        /// Steps of the run.
        step: u64,
        /// The parameters, and the steps that they missed.
        late: LateParams,
        /// Those of which it had no state at all.
        fresh: BTreeSet<String>,
    },
    /// The run has come to its end with a loss that no run should continue from.
    Exploded(Exploded),
    /// A warning about the data.
    Data(DataWarning),
    /// The metrics endpoint could not be opened.
    NotListening {
        /// The address to listen on.
        address: SocketAddr,
        /// The error.
        fault: String,
    },
    /// No disk space could be reserved for the next checkpoint.
    NotReserved {
        /// The error.
        fault: String,
    },
}

impl fmt::Display for RunWarning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RunWarning::NoLocks { out_dir } => write!(
                f,
                "run.out_dir {} is on a file system without locks: a second run there would not be noticed",
                out_dir.display()
            ),
            RunWarning::PassedOver { path, fault } => {
                write!(f, "{} is damaged and was skipped: {fault}", path.display())
            }
            RunWarning::LateParams { path, step, late, fresh } => write!(
                f,
                "the optimizer in {} has {}; after {step} steps of the run, they continue with their own step counts, as \
                 in torch.optim",
                path.display(),
                missed_steps(*step, late, fresh)
            ),
            RunWarning::Exploded(exploded) => exploded.fmt(f),
            RunWarning::Data(warning) => warning.fmt(f),
            RunWarning::NotListening { address, fault } => {
                write!(f, "metrics are not served at run.metrics_listen = \"{address}\": {fault}")
            }
            RunWarning::NotReserved { fault } => {
                write!(f, "no disk space is reserved for the next checkpoint: {fault}")
            }
        }
    }
}

/// What an optimizer lacks of the steps of a run: `no state of 2 parameters (a, b), which begin with zeros`.
fn missed_steps(step: u64, late: &LateParams, fresh: &BTreeSet<String>) -> String {
    let (fresh, fewer): (Vec<_>, Vec<_>) = late.iter().partition(|(name, _)| fresh.contains(*name));
    let fresh: Vec<String> = fresh.into_iter().map(|(name, _)| name.clone()).collect();
    let counted = |(name, missed): (&String, &u64)| format!("{name} ({})", step - missed);
    let fewer: Vec<String> = fewer.into_iter().map(counted).collect();
    let parameters = |names: &[String]| match names.len() {
        1 => "1 parameter".to_owned(),
        count => format!("{count} parameters"),
    };
    let mut all = Vec::new();
    if !fresh.is_empty() {
        all.push(format!("no state of {} ({}), which begin with zeros", parameters(&fresh), listed(&fresh)));
    }
    if !fewer.is_empty() {
        all.push(format!("fewer steps of {}: {}", parameters(&fewer), listed(&fewer)));
    }
    all.join(", and ")
}

/// Names for a message: all of a few, or the first of many.
fn listed(names: &[String]) -> String {
    const LISTED: usize = 4;
    let shown = names.iter().take(LISTED).cloned().collect::<Vec<_>>().join(", ");
    if names.len() > LISTED { shown + ", .." } else { shown }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn late_parameters_are_named_with_their_counts() {
        let missed = |all: &[(&str, u64)], fresh: &[&str]| {
            let late = all.iter().map(|(name, missed)| ((*name).to_owned(), *missed)).collect();
            missed_steps(5, &late, &fresh.iter().map(|&name| name.to_owned()).collect())
        };
        assert_eq!(missed(&[("a", 5)], &["a"]), "no state of 1 parameter (a), which begin with zeros");
        let both = missed(&[("a", 5), ("b", 1), ("c", 4)], &["a"]);
        let expected = "no state of 1 parameter (a), which begin with zeros, and fewer steps of 2 parameters: b (4), c (1)";
        assert_eq!(both, expected);
        let all = ["a", "b", "c", "d", "e"];
        assert!(missed(&all.map(|name| (name, 5)), &all).contains("5 parameters (a, b, c, d, ..)"));
        // It has moments, which are used.
        assert_eq!(missed(&[("a", 5)], &[]), "fewer steps of 1 parameter: a (0)");
    }
}
