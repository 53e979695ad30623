//! The `fsdp` command.
//!
//! It parses arguments, chooses the launcher, prints reports and maps outcomes to exit codes; training itself is in
//! `fsdp-train`. There is one module per subcommand, followed by modules that several of them share.
//!
//! Exit codes are defined in [`exit_code`].

#[expect(unsafe_code, reason = "the one module of this crate that may")]
mod allocator;

mod args;
mod bench;
mod byte_progress;
mod calibrate;
mod check;
mod ckpt;
#[cfg(feature = "xla")]
mod compile;
mod doctor;
mod eval;
mod generate;
mod init;
mod launch;
mod plan;
mod report;
mod schedule;
mod shell;
mod token_progress;
mod train;
mod verify;

mod run_setup;
mod shrink;
mod trace;

mod atomic_file;
mod audit;
mod cluster;
mod descriptors;
mod device;
mod document;
mod error;
mod exit_code;
mod logging;
#[cfg(feature = "xla")]
mod out_of_memory_report;
mod output;
mod progress;
#[cfg(any(feature = "xla", not(feature = "torch")))]
mod python;
mod stop_signal;
mod threads;
mod toml_text;
mod units;
mod version;
#[cfg(not(feature = "torch"))]
mod with_libtorch;

use std::panic::{self, AssertUnwindSafe};
use std::process::ExitCode;

use clap::Parser;
use fsdp_core::FailureKind;
use fsdp_data::contain_chat_templates;

use args::{Args, BenchCommand, Command};
use error::CliError;
use exit_code::Exit;

#[global_allocator]
static ALLOCATOR: allocator::Allocator = allocator::Allocator;

fn main() -> ExitCode {
    if let Some(served) = contain_chat_templates() {
        return match served {
            Ok(()) => Exit::Done.into(),
            Err(error) => {
                output::error(&error);
                Exit::Input.into()
            }
        };
    }
    allocator::share_heap_under_limit();
    match Args::try_parse() {
        Ok(Args { command, logs }) => {
            output::set_style(logs);
            #[cfg(not(feature = "torch"))]
            with_libtorch::take_over(&command);
            exit_of(|| run(command)).into()
        }
        Err(error) => {
            if !error.use_stderr() {
                output::usage(&error);
                return Exit::Done.into();
            }
            cluster::report_once(&error.to_string(), || output::usage(&error));
            Exit::Input.into()
        }
    }
}

/// The exit of a command that succeeds, fails or panics. Reports the error; a panic has already been reported.
fn exit_of(command: impl FnOnce() -> Result<Exit, CliError>) -> Exit {
    // The command's state is not used after a panic.
    match panic::catch_unwind(AssertUnwindSafe(command)) {
        Ok(Ok(exit)) => exit,
        Ok(Err(error)) => {
            cluster::report_to_torchrun(&error.to_string());
            match error.kind() {
                FailureKind::Input => cluster::report_once(&error.to_string(), || output::error(&error)),
                _ => output::error(&error),
            }
            error.exit()
        }
        Err(_) => Exit::Failed,
    }
}

fn run(command: Command) -> Result<Exit, CliError> {
    allocator::exit_when_memory_runs_out()?;
    // Commands that need a single process run only in the first of several.
    let is_alone = matches!(
        command,
        Command::Init(_)
            | Command::Check(_)
            | Command::Schedule(_)
            | Command::Generate(_)
            | Command::Plan(_)
            | Command::Report(_)
            | Command::Completions(_)
            | Command::Man(_)
            | Command::Schema(_)
    );
    // These take no place among other processes, so the variables of a launcher may be anything: a pod has some of
    // torchrun's where `fsdp launch` starts the processes.
    let is_apart = matches!(
        command,
        Command::Launch(_)
            | Command::Ckpt(_)
            | Command::Completions(_)
            | Command::Man(_)
            | Command::Schema(_)
    );
    if !(is_apart && cluster::is_launched().is_err()) {
        if is_alone && cluster::is_not_first(cluster::place()?) {
            return Ok(Exit::Done);
        }
        if cluster::is_launched()? {
            cluster::watch_launcher()?;
        }
        // From here on only one of several processes prints, except that every `fsdp launch` does.
        if !matches!(command, Command::Launch(_)) {
            cluster::place()?;
        }
    }
    if !is_apart || matches!(command, Command::Ckpt(_)) {
        threads::start()?;
    }
    execute(command)
}

fn execute(command: Command) -> Result<Exit, CliError> {
    match command {
        Command::Init(args) => init::run(&args),
        Command::Train(args) => train::run(&args),
        Command::Launch(args) => launch::run(&args),
        Command::Verify(args) => verify::run(&args),
        Command::Audit(args) => audit::run(&args),
        Command::Ckpt(command) => ckpt::run(&command).map(exit_of_check),
        Command::Eval(args) => eval::run(&args),
        Command::Generate(args) => generate::run(&args).map(|()| Exit::Done),
        Command::Check(args) => check::run(&args),
        Command::Schedule(args) => schedule::run(&args).map(|()| Exit::Done),
        Command::Plan(args) => plan::run(&args).map(|()| Exit::Done),
        #[cfg(feature = "xla")]
        Command::Compile(args) => compile::run(&args).map(|()| Exit::Done),
        Command::Calibrate(args) => calibrate::run(&args),
        Command::Report(args) => report::run(&args).map(|()| Exit::Done),
        Command::Bench(BenchCommand::Train(args)) => bench::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Completions(args) => shell::completions(&args).map(|()| Exit::Done),
        Command::Man(args) => shell::man(&args).map(|()| Exit::Done),
        Command::Schema(_) => shell::schema().map(|()| Exit::Done),
    }
}

fn exit_of_check(holds: bool) -> Exit {
    if holds { Exit::Done } else { Exit::Found }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panicking_command_exits_as_failed() {
        assert_eq!(exit_of(|| panic!("a bug of ours")), Exit::Failed);
        assert_eq!(exit_of(|| Ok(Exit::Found)), Exit::Found);
        assert_eq!(exit_of(|| Err(CliError::Input("impossible".to_owned()))), Exit::Input);
    }
}
