//! The command to launch, and its arguments after a failure.

use std::ffi::OsString;

use clap::Parser;
use fsdp_ckpt::native::RunDir;
use fsdp_config::World;

use crate::args::{Args, BenchCommand, Command, LaunchArgs, TrainArgs};
use crate::error::CliError;
use crate::run_setup::RunSetup;

/// A command whose processes are started together.
pub(super) struct Plan {
    arguments: Vec<OsString>,
    /// The output folder of a training run.
    run: Option<RunDir>,
}

impl Plan {
    /// Parses the arguments after `--`. Errors in them are reported here, once, and not by each process.
    ///
    /// # Errors
    /// [`CliError`].
    pub(super) fn new(args: &LaunchArgs) -> Result<Self, CliError> {
        let arguments = std::iter::once(OsString::from("fsdp")).chain(args.command.iter().cloned());
        let command =
            Args::try_parse_from(arguments).map_err(|error| CliError::Launched(Box::new(error)))?.command;
        let run = match &command {
            Command::Train(train) => Some(run_of(train, args)?),
            Command::Bench(BenchCommand::Train(_))
            | Command::Verify(_)
            | Command::Audit(_)
            | Command::Eval(_)
            | Command::Schedule(_)
            | Command::Doctor(_)
            | Command::Calibrate(_) => None,
            _ => {
                let what = "only `train`, `bench train`, `verify`, `audit`, `eval`, `schedule`, `calibrate` and `doctor` run as several processes; start other commands directly";
                return Err(CliError::Option { option: "--", what: what.to_owned() });
            }
        };
        Ok(Self { arguments: args.command.clone(), run })
    }

    /// The arguments of an attempt. If the output folder has belonged to this run in an earlier attempt, the run resumes
    /// from its newest checkpoint; without a checkpoint it begins as requested and overwrites its own output. Otherwise
    /// the contents of the folder are another run's.
    ///
    /// # Errors
    /// [`CliError`]: the output folder cannot be read.
    pub(super) fn arguments(&self, is_taken_over: bool) -> Result<Vec<OsString>, CliError> {
        match self.run.as_ref().filter(|_| is_taken_over) {
            None => Ok(self.arguments.clone()),
            Some(run) => Ok(restart_arguments(&self.arguments, run.newest()?.is_some())),
        }
    }
}

/// The arguments for restarting a training run.
fn restart_arguments(arguments: &[OsString], has_checkpoint: bool) -> Vec<OsString> {
    let is = |argument: &OsString, name: &str| argument.to_str() == Some(name);
    let has = |name| arguments.iter().any(|argument| is(argument, name));
    if has("--resume") || !has_checkpoint {
        let needs_overwrite = !has("--resume") && !has("--overwrite");
        let overwrite = needs_overwrite.then(|| OsString::from("--overwrite"));
        return arguments.iter().cloned().chain(overwrite).collect();
    }
    let mut kept = Vec::new();
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        if is(argument, "--resume-from") {
            rest.next();
        } else if !is(argument, "--overwrite")
            && !argument.to_str().is_some_and(|text| text.starts_with("--resume-from="))
        {
            kept.push(argument.clone());
        }
    }
    kept.push("--resume".into());
    kept
}

fn run_of(train: &TrainArgs, args: &LaunchArgs) -> Result<RunDir, CliError> {
    // Warnings are left to the processes.
    let (setup, _) = RunSetup::read(&train.run, &|_| World { ranks: args.nproc, nodes: Some(1) })?;
    Ok(RunDir::new(setup.config.run.out_dir))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn restarted(given: &str, has_checkpoint: bool) -> String {
        let given: Vec<OsString> = given.split(' ').map(OsString::from).collect();
        let restarted: Vec<String> = restart_arguments(&given, has_checkpoint)
            .into_iter()
            .map(|argument| argument.into_string().unwrap())
            .collect();
        restarted.join(" ")
    }

    #[test]
    fn existing_checkpoints_are_resumed_only_after_takeover() {
        let out = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(out.path().join("checkpoints/step-00000005")).unwrap();
        let given: Vec<OsString> = ["train", "a.toml", "--overwrite"].map(OsString::from).into();
        let plan = Plan { arguments: given.clone(), run: Some(RunDir::new(out.path())) };
        assert_eq!(plan.arguments(false).unwrap(), given);
        assert_eq!(plan.arguments(true).unwrap(), ["train", "a.toml", "--resume"]);
    }

    #[test]
    fn restart_with_checkpoint_resumes_it() {
        assert_eq!(restarted("train a.toml", true), "train a.toml --resume");
        assert_eq!(restarted("train a.toml --overwrite", true), "train a.toml --resume");
        assert_eq!(
            restarted("train a.toml --resume-from b --set x.y=1", true),
            "train a.toml --set x.y=1 --resume"
        );
        assert_eq!(restarted("train --resume-from=b a.toml", true), "train a.toml --resume");
        assert_eq!(restarted("train a.toml --resume", true), "train a.toml --resume");
    }

    #[test]
    fn restart_without_checkpoint_begins_as_requested() {
        assert_eq!(restarted("train a.toml", false), "train a.toml --overwrite");
        assert_eq!(
            restarted("train a.toml --resume-from b", false),
            "train a.toml --resume-from b --overwrite"
        );
        assert_eq!(restarted("train a.toml --resume", false), "train a.toml --resume");
        assert_eq!(restarted("train a.toml --overwrite", false), "train a.toml --overwrite");
    }
}
