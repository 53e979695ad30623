//! `fsdp init`: writes a first run file.
//!
//! Choices that options leave open are asked at a terminal or get defaults; sizes follow from the model and the data.
//! The text is parsed and checked as by `fsdp check` before it is written to the file.

mod answers;
mod choices;
mod text;

use std::io::{BufRead, Write};
use std::path::Path;

use fsdp_ckpt::is_url;
use fsdp_ckpt::training::ModelWeights;
use fsdp_config::{Device, Resolved};
use fsdp_data::{Survey, Tokenizer, survey};

use crate::args::InitArgs;
use crate::atomic_file::{self, folder_of};
use crate::check::Findings;
use crate::document::print;
use crate::error::CliError;
use crate::exit_code::Exit;
use crate::run_setup::{RunSetup, read_model};
use crate::{device, logging, output};
use answers::{Answers, OnTerminal};
use choices::{Choices, Training};

/// Number of steps if nothing is known about the data.
const STEPS: u64 = 1000;

/// Writes a run file, unless its run would not start.
///
/// # Errors
/// [`CliError`]: options do not fit together, or the file cannot be written.
pub(crate) fn run(args: &InitArgs) -> Result<Exit, CliError> {
    logging::install(None)?;
    expect_free(args)?;
    let choices = choose(args, &mut OnTerminal::here(args.yes))?;
    let text = text::of(&choices);
    let read = parse(&text, &args.file).and_then(RunSetup::of);
    let findings = Findings::of(&args.file, read);
    if findings.has_errors() {
        print(&findings, false)?;
        output::note(&format!("{} was not written", args.file.display()));
        return Ok(Exit::Input);
    }
    findings.warnings().for_each(|warning| output::warning(&warning));
    let write = if args.force { atomic_file::replace } else { atomic_file::create };
    write(&args.file, &text).map_err(CliError::write(&args.file))?;
    let file = args.file.display();
    output::print(&format!("wrote {file}\n\nnext:\n  fsdp check {file}\n  fsdp train {file}\n"))?;
    Ok(Exit::Done)
}

/// Checks that the file can be created, before any questions are asked.
fn expect_free(args: &InitArgs) -> Result<(), CliError> {
    let rejected = |what| Err(CliError::Option { option: "RUN.toml", what });
    let file = args.file.display();
    if !args.force && args.file.symlink_metadata().is_ok() {
        return rejected(format!("{file} exists already; give another name, or replace it with --force"));
    }
    match folder_of(&args.file) {
        folder if folder.is_dir() => Ok(()),
        folder => {
            rejected(format!("{file} is in {}, which is not a folder; create it first", folder.display()))
        }
    }
}

/// Makes all choices of the file.
fn choose<R: BufRead, W: Write>(args: &InitArgs, answers: &mut Answers<R, W>) -> Result<Choices, CliError> {
    answers.expect(&[("--model", args.model.is_some()), ("--data", !args.data.is_empty())])?;
    let question = "Model (a Hugging Face directory)";
    let parse_model = |answer: &str| read_model(Path::new(answer)).map(|_| answer.to_owned());
    let model = answers.value("--model", question, args.model.clone(), None, parse_model)?;
    let config = read_model(Path::new(&model))?;
    let training = training(args, &model, answers)?;
    let mut choices = Choices::new(model, &config, training, output_folder(args)?)?;
    choices.eval.clone_from(&args.eval);
    choices.format.clone_from(&args.format);
    choices.column.clone_from(&args.column);
    choices.device = args.device.unwrap_or_else(default_device);

    let found = data(args, &mut choices, answers)?;
    choices.ranks = ranks(args, choices.device, answers)?;
    choices.fit(found);
    if found.is_some_and(|found| found.has_text && !found.has_prompts) {
        let tokenizer = Tokenizer::load(&choices.tokenizer)?;
        choices.separator = tokenizer.separator()?;
    }
    if choices.lacks_tokenizer && found.is_none_or(|found| found.tokens.is_none()) {
        output::warning(&format!(
            "{} has no tokenizer.json: text becomes bytes, which its weights were not trained on; set data.tokenizer",
            choices.model
        ));
    }
    let default = choices.epoch_steps.map_or(STEPS, |epoch| choices.training.steps(epoch));
    let parse_steps = |answer: &str| {
        let steps = answer.parse().ok().filter(|&steps| steps > 0);
        steps.ok_or_else(|| "give an integer of at least 1".to_owned())
    };
    choices.steps = answers.value("--steps", "Optimizer steps", args.steps, Some(default), parse_steps)?;
    Ok(choices)
}

/// What to train: as set by options or, if there are pretrained weights, by asking.
fn training<R: BufRead, W: Write>(
    args: &InitArgs,
    model: &str,
    answers: &mut Answers<R, W>,
) -> Result<Training, CliError> {
    let has_weights = ModelWeights::are_in(model);
    let option = if args.qlora { "--qlora" } else { "--lora" };
    if (args.lora || args.qlora) && !has_weights {
        let what = format!("{model} has no weights to add adapters to");
        return Err(CliError::Option { option, what });
    }
    let given = match args {
        InitArgs { lora: true, .. } => Some(Training::Adapters),
        InitArgs { qlora: true, .. } => Some(Training::Quantized),
        _ => (args.from_scratch || !has_weights).then_some(Training::New),
    };
    let question = "What is trained: the \"whole\" model, \"lora\" adapters, \"qlora\" adapters of a model in 4 bits, or \
                    new weights from \"scratch\"";
    answers.value(option, question, given, Some(Training::Whole), Training::parse)
}

/// Examines the data and records its kind. If it cannot be read, the check of the whole file reports why.
fn data<R: BufRead, W: Write>(
    args: &InitArgs,
    choices: &mut Choices,
    answers: &mut Answers<R, W>,
) -> Result<Option<Survey>, CliError> {
    let draft = choices.clone();
    let parse_data = |answer: &str| {
        let train = vec![answer.to_owned()];
        survey_data(&Choices { train: train.clone(), ..draft.clone() }, &args.file).map(|_| Paths(train))
    };
    let given = Some(args.data.clone()).filter(|data| !data.is_empty()).map(Paths);
    let question = "Data (a file, a folder or a pattern)";
    choices.train = answers.value("--data", question, given, None, parse_data)?.0;
    Ok(survey_data(choices, &args.file).ok().flatten())
}

/// Paths for display.
struct Paths(Vec<String>);

impl std::fmt::Display for Paths {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0.join(" "))
    }
}

/// Surveys the data; `None` if it is in an object store.
fn survey_data(choices: &Choices, file: &Path) -> Result<Option<Survey>, CliError> {
    let config = parse(&text::of(choices), file)?.config;
    if config.data.train.iter().any(is_url) {
        return Ok(None);
    }
    let found = survey(&config.data.train, &config.data, Path::new(&config.run.out_dir))?;
    Ok(Some(found))
}

fn parse(text: &str, file: &Path) -> Result<fsdp_config::Loaded, CliError> {
    Ok(Resolved::parse(text, &file.display().to_string(), &[])?)
}

fn ranks<R: BufRead, W: Write>(
    args: &InitArgs,
    device: Device,
    answers: &mut Answers<R, W>,
) -> Result<usize, CliError> {
    let (what, default) = match device {
        Device::Cuda => ("one per GPU", gpus().max(1)),
        Device::Xla => ("one per device of the plugin", 1),
        Device::Cpu | Device::TorchCpu => ("threads that share this machine's cores", 1),
    };
    let parse_ranks = |answer: &str| {
        let ranks = answer.parse().ok().filter(|&ranks| ranks > 0);
        ranks.ok_or_else(|| "give an integer of at least 1".to_owned())
    };
    answers.value("--ranks", &format!("Ranks ({what})"), args.ranks, Some(default), parse_ranks)
}

fn default_device() -> Device {
    match device::expect(Device::Cuda) {
        Ok(()) if gpus() > 0 => Device::Cuda,
        _ => Device::Cpu,
    }
}

fn gpus() -> usize {
    // Errors of the driver are reported when it is needed.
    fsdp_cuda::device::gpu_count().unwrap_or(0)
}

/// The output folder: as given, or named after the file.
fn output_folder(args: &InitArgs) -> Result<String, CliError> {
    if let Some(folder) = &args.out {
        return Ok(folder.clone());
    }
    let name = args.file.file_stem().and_then(|name| name.to_str());
    let nameless = || CliError::Option {
        option: "--out",
        what: format!("give this option: no folder can be named after {}", args.file.display()),
    };
    name.map(|name| format!("runs/{name}")).ok_or_else(nameless)
}
