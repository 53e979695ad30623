//! What each process of a run announces to all others before compiling: the settings that must match, and its devices.

use std::time::Duration;

use fsdp_comm::assembly::{Assembly, AssemblyError};
use fsdp_core::Rank;
use fsdp_core::comm::CommError;
use prost::Message;

use crate::error::XlaError;
use crate::ffi::Client;
use crate::flags::{VARIABLES, environment_flags};

/// The announcement of one process.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Announcement {
    /// The plugin: its platform and the platform's version, and the version of its API.
    #[prost(string, tag = "1")]
    plugin: String,
    /// The compiler settings from the environment, in the order of [`VARIABLES`].
    #[prost(string, repeated, tag = "2")]
    flags: Vec<String>,
    /// The IDs of the process's devices, in rank order.
    #[prost(uint64, repeated, tag = "3")]
    pub(crate) ids: Vec<u64>,
}

impl Announcement {
    /// Creates the announcement of this process.
    ///
    /// # Errors
    /// Any error of the plugin.
    pub(crate) fn of(client: &Client) -> Result<Self, XlaError> {
        let ([platform, version], (major, minor)) = (client.platform()?, client.api_version());
        let plugin = format!("{platform} ({}), PJRT {major}.{minor}", version.replace('\n', " "));
        let flags = environment_flags().iter().map(|value| value.to_string_lossy().into_owned()).collect();
        Ok(Self { plugin, flags, ids: client.ids()? })
    }
}

/// Exchanges announcements and returns those of all processes, in process order. This process is number `process` and
/// announces `announcement`. All processes hold the same number of ranks.
///
/// # Errors
/// A process has announced nothing within the limit, or the world has failed.
pub(crate) fn exchange(
    assembly: &dyn Assembly,
    process: usize,
    announcement: &Announcement,
    limit: Duration,
) -> Result<Vec<Announcement>, AssemblyError> {
    let (ranks_per_process, topic) = (assembly.local().len(), |process: usize| format!("process {process}"));
    assembly.announce(&topic(process), announcement.encode_to_vec())?;
    let receive = |process: usize| {
        let first = Rank(process * ranks_per_process);
        let message = assembly.hear(&topic(process), limit).map_err(|error| match error {
            AssemblyError::Late { limit, .. } => AssemblyError::Late { ranks: vec![first], limit },
            other => other,
        })?;
        let damaged =
            |error| CommError::Transport { rank: first, reason: format!("an announcement: {error}") };
        Ok(Announcement::decode(&*message).map_err(damaged)?)
    };
    (0..assembly.world() / ranks_per_process).map(receive).collect()
}

/// Checks that all processes, each with `ranks_per_process` ranks, compile the same text to the same program.
///
/// # Errors
/// [`XlaError::Unusable`], naming what differs.
pub(crate) fn expect_one_compiler(all: &[Announcement], ranks_per_process: usize) -> Result<(), XlaError> {
    let differs = |part: &dyn Fn(&Announcement) -> String, what| {
        let expected = part(&all[0]);
        let other = all.iter().map(part).enumerate().find(|(_, got)| *got != expected);
        other.map_or(Ok(()), |(process, got)| {
            Err(XlaError::Unusable(format!(
                "{} has {what} {got}, and {} has {expected}: each process compiles the program, and the results would differ; \
                 give all processes the same plugin version and the same flags",
                Rank(process * ranks_per_process),
                Rank(0)
            )))
        })
    };
    differs(&|announcement| announcement.plugin.clone(), "the plugin")?;
    VARIABLES.iter().enumerate().try_for_each(|(number, variable)| {
        let flags = |announcement: &Announcement| {
            format!("{:?}", announcement.flags.get(number).map_or("", |flags| flags))
        };
        differs(&flags, variable)
    })
}

#[cfg(test)]
mod tests {
    use fsdp_comm::assembly::InMemoryAssembly;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(600);

    fn announcement(plugin: &str, flags: [&str; 2], ids: &[u64]) -> Announcement {
        let flags = flags.map(str::to_owned).to_vec();
        Announcement { plugin: plugin.to_owned(), flags, ids: ids.to_vec() }
    }

    #[test]
    fn single_process_exchange_returns_own_announcement() {
        let assembly = InMemoryAssembly::new(3);
        let own = announcement("tpu (1), PJRT 0.1", ["--a", ""], &[7, 1 << 40, 0]);
        assert_eq!(exchange(&assembly, 0, &own, LIMIT), Ok(vec![own]));
    }

    #[test]
    fn compiler_mismatch_names_first_differing_rank() {
        let own = announcement("tpu (1), PJRT 0.1", ["--a", ""], &[0, 1]);
        expect_one_compiler(&[own.clone(), Announcement { ids: vec![5], ..own.clone() }], 2).unwrap();
        let others = [
            (
                "tpu (2), PJRT 0.1",
                ["--b", ""],
                "rank 4 has the plugin tpu (2), PJRT 0.1, and rank 0 has tpu (1), PJRT 0.1",
            ),
            ("tpu (1), PJRT 0.1", ["", "--b"], "rank 4 has XLA_FLAGS \"\", and rank 0 has \"--a\""),
            ("tpu (1), PJRT 0.1", ["--a", "--b"], "rank 4 has LIBTPU_INIT_ARGS \"--b\", and rank 0 has \"\""),
        ];
        for (plugin, flags, expected) in others {
            let other = announcement(plugin, flags, &[]);
            let error = expect_one_compiler(&[own.clone(), own.clone(), other], 2).unwrap_err();
            assert!(error.to_string().starts_with(&format!("{expected}: each process compiles")), "{error}");
        }
    }
}
