//! The `fsdp` command: train, verify, schedule, ckpt and bench.
//!
//! It parses arguments, chooses the launcher, prints reports and maps outcomes to exit codes; training
//! itself is `fsdp-train`. One module per command; what several of them need stands below them.
//!
//! Exit codes: 0 done, 1 a verification failed or checkpoints differ, 2 the input is wrong or the output cannot
//! be written, 3 the run failed, 75 stopped by SIGTERM with nothing lost, 130 interrupted (a training run: before its
//! first step, or for the second time).
#![forbid(unsafe_code)]

mod args;
mod bench;
mod ckpt;
mod doctor;
mod schedule;
mod train;
mod verify;

mod run_setup;
mod shrink;
mod trace;

mod clock;
#[cfg(feature = "cuda")]
mod cuda;
mod device;
mod error;
mod host;
mod launch_env;
mod logging;
mod output;
mod progress;
mod stop_signal;
#[cfg(feature = "torch")]
mod torch;
mod units;

use std::process::ExitCode;

use clap::Parser;

use args::{Args, BenchCommand, Command};
use error::CliError;

/// A verification found a broken promise, or a comparison a difference.
const VERIFICATION_FAILED: u8 = 1;

fn main() -> ExitCode {
    match run(Args::parse().command) {
        Ok(code) => code,
        Err(error) => {
            output::error(&error);
            ExitCode::from(error.exit_code())
        }
    }
}

fn run(command: Command) -> Result<ExitCode, CliError> {
    if matches!(command, Command::Train(_) | Command::Verify(_) | Command::Bench(_)) {
        launch_env::refuse_process_worlds()?;
    }
    match command {
        Command::Train(args) => train::run(&args),
        Command::Verify(args) => verify::run(&args).map(judged),
        Command::Ckpt(command) => ckpt::run(&command).map(judged),
        Command::Schedule(args) => schedule::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Bench(BenchCommand::Train(args)) => bench::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Bench(BenchCommand::Gpu(args)) => bench::gpu::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Doctor(args) => doctor::run(&args).map(|()| ExitCode::SUCCESS),
    }
}

fn judged(holds: bool) -> ExitCode {
    if holds { ExitCode::SUCCESS } else { ExitCode::from(VERIFICATION_FAILED) }
}
