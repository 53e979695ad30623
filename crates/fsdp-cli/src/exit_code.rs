//! The table of exit codes, shown by `--help` and docs/exit-codes.md.

use std::process::ExitCode;

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};
use fsdp_core::FailureKind;

/// Width of the help page.
const HELP_COLUMNS: u16 = 98;

/// How a command ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    /// It did what it was asked to do.
    Done,
    /// It completed and found a problem.
    Found,
    /// The request is impossible.
    Input,
    /// It failed, and would fail again.
    Failed,
    /// It ended early and can be resumed: `EX_TEMPFAIL` of sysexits.h.
    Temporary,
    /// The user interrupted it; the code is the one shells report for SIGINT.
    Interrupted,
}

impl Exit {
    /// All exits, in the order of their codes.
    const ALL: [Exit; 6] =
        [Exit::Done, Exit::Found, Exit::Input, Exit::Failed, Exit::Temporary, Exit::Interrupted];

    /// The number that the parent process sees.
    pub(crate) const fn code(self) -> u8 {
        match self {
            Exit::Done => 0,
            Exit::Found => 1,
            Exit::Input => 2,
            Exit::Failed => 3,
            Exit::Temporary => 75,
            Exit::Interrupted => 130,
        }
    }

    /// The exit of a code; `None` if it is not one of ours.
    pub(crate) fn of_code(code: i32) -> Option<Exit> {
        Self::ALL.into_iter().find(|exit| i32::from(exit.code()) == code)
    }

    /// What the code means.
    const fn meaning(self) -> &'static str {
        match self {
            Exit::Done => "done",
            Exit::Found => {
                "a verification failed or found nothing to verify, an audited step is wrong, checkpoints differ or are damaged, \
                 or `doctor` found what would fail a run"
            }
            Exit::Input => {
                "usage, configuration or input is wrong, or what a device needs is missing: change that first"
            }
            Exit::Failed => {
                "the run failed and would fail again: a loss or state that is not finite, ranks that disagree, a full \
                 device, a panic"
            }
            Exit::Temporary => {
                "SIGTERM or SIGUSR1 stopped the run and its state is saved; or something outside failed: a full disk or \
                 quota, I/O, a lock that another run holds, a rank or save that is late, a process that is lost, a \
                 thread, memory, a device"
            }
            Exit::Interrupted => {
                "interrupted (a training run: before its first step, or for the second time)"
            }
        }
    }

    /// Whether a scheduler should start the same command again.
    const fn retry(self) -> &'static str {
        match self {
            Exit::Done | Exit::Found | Exit::Input | Exit::Failed => "no",
            Exit::Temporary => "yes; `train` with `--resume`",
            Exit::Interrupted => "as you like",
        }
    }

    const fn row(self) -> [&'static str; 2] {
        [self.meaning(), self.retry()]
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> ExitCode {
        ExitCode::from(exit.code())
    }
}

impl From<FailureKind> for Exit {
    fn from(kind: FailureKind) -> Exit {
        match kind {
            FailureKind::Input => Exit::Input,
            FailureKind::Permanent => Exit::Failed,
            FailureKind::Temporary => Exit::Temporary,
            FailureKind::Interrupted => Exit::Interrupted,
        }
    }
}

/// The table of the help page.
pub(crate) fn help() -> String {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_content_arrangement(ContentArrangement::Dynamic);
    table.set_width(HELP_COLUMNS).set_header(["exit code", "meaning", "retry"]);
    for exit in Exit::ALL {
        let [meaning, retry] = exit.row();
        let plain = |text: &str| text.replace('`', "");
        table.add_row([exit.code().to_string(), plain(meaning), plain(retry)]);
    }
    if let Some(codes) = table.column_mut(0) {
        codes.set_cell_alignment(CellAlignment::Right);
    }
    table.lines().map(|line| format!("{}\n", line.trim_end())).collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// The table as in the documents.
    fn markdown() -> String {
        let row = |exit: Exit| {
            let [meaning, retry] = exit.row();
            format!("| {} | {meaning} | {retry} |\n", exit.code())
        };
        let rows: String = Exit::ALL.into_iter().map(row).collect();
        format!("| code | meaning | retry |\n|---|---|---|\n{rows}")
    }

    #[test]
    fn docs_exit_codes_page_contains_table() {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/exit-codes.md");
        let page = std::fs::read_to_string(&file).unwrap();
        let (before, rest) = page.split_once("| code |").unwrap();
        let (_, after) = rest.split_once("\n\n").unwrap();
        let current = format!("{before}{}\n{after}", markdown());
        if std::env::var_os("UPDATE_DOCS").is_some() {
            std::fs::write(&file, &current).unwrap();
            return;
        }
        assert_eq!(page, current, "run `UPDATE_DOCS=1 cargo test -p fsdp-cli --bins docs_exit_codes`");
    }

    #[test]
    fn exit_codes_match_documented_values() {
        assert_eq!(Exit::ALL.map(Exit::code), [0, 1, 2, 3, 75, 130]);
    }

    #[test]
    fn only_temporary_failure_is_retryable() {
        let again = Exit::ALL.into_iter().filter(|exit| exit.retry().starts_with("yes"));
        assert_eq!(again.collect::<Vec<_>>(), [Exit::from(FailureKind::Temporary)]);
    }
}
