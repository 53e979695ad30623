//! What programs save of their schedule, clipping and dtype, each in its own way.

use std::collections::BTreeMap;

use fsdp_ckpt::checkpoint::Value;
use fsdp_ckpt::safetensors::TensorType;

use super::folder::{Folder, Settings, number};
use super::lines::{self, Line};
use crate::toml_text::string;

/// The program that made the folder.
pub(super) struct Program {
    /// As the run file names it.
    pub(super) name: &'static str,
    schedule: Schedule,
    /// Clipping and terms of the loss.
    pub(super) train: Vec<Line>,
    /// The dtype of the computation.
    pub(super) dtype: Line,
}

/// What is known of the learning rate.
#[derive(Debug, PartialEq)]
enum Schedule {
    /// The whole schedule, in a form of the run file, with its last step.
    Shape { text: String, from: String, steps: u64, steps_from: &'static str, base: Option<f64> },
    /// The scheduler has moved on `moved` times, and the optimizer has the rate of the step after that.
    Moved { moved: Option<f64>, from: String },
    /// Nothing.
    Unknown,
}

impl Program {
    pub(super) fn of(folder: &Folder) -> Self {
        match (&folder.arguments, &folder.deepspeed, &folder.titan) {
            (Some(arguments), ..) => Self::trainer(folder, arguments),
            (_, Some(config), _) => Self::deepspeed(folder, config),
            (_, _, Some(job)) => Self::titan(folder, job),
            _ => Self::other(folder),
        }
    }

    fn trainer(folder: &Folder, arguments: &Settings) -> Self {
        let from = |key: &str| format!("{}: {key}", arguments.file);
        let mut train = vec![clip(arguments, "max_grad_norm")];
        if let Some(share) = arguments.number("label_smoothing_factor").filter(|share| *share > 0.0) {
            train.push(Line::known("label_smoothing", lines::number(share), from("label_smoothing_factor")));
        }
        if let Some(alpha) = arguments.number("neftune_noise_alpha") {
            let from = from("neftune_noise_alpha");
            train.push(Line::note(format!(
                "{from} = {alpha}: noise that cannot be drawn again; switch it off for the step"
            )));
        }
        let dtype = match (arguments.is_on("bf16"), arguments.is_on("fp16")) {
            (true, _) => Line::known("param_dtype", string("bf16"), from("bf16")),
            (_, true) => Line::known("param_dtype", string("f16"), from("fp16")),
            _ => of_weights(folder, &format!("{} has neither bf16 nor fp16", arguments.file)),
        };
        let schedule = trainer_schedule(arguments, folder.state.as_ref());
        Self {
            name: "transformers' Trainer",
            schedule: schedule.unwrap_or_else(|| moved(folder)),
            train,
            dtype,
        }
    }

    fn deepspeed(folder: &Folder, config: &Settings) -> Self {
        let dtype = match (config.is_on("bf16.enabled"), config.is_on("fp16.enabled")) {
            (true, _) => Line::known("param_dtype", string("bf16"), format!("{}: bf16", config.file)),
            (_, true) => Line::known("param_dtype", string("f16"), format!("{}: fp16", config.file)),
            _ => of_weights(folder, &format!("{} has neither bf16 nor fp16", config.file)),
        };
        let train = vec![match config.number("gradient_clipping") {
            Some(_) => clip(config, "gradient_clipping"),
            None => Line::open(
                "grad_clip",
                "1.0",
                format!(
                    "{} has no number for gradient_clipping, and DeepSpeed 0.19.8 clips to a norm of 1 then",
                    config.file
                ),
            ),
        }];
        Self { name: "DeepSpeed", schedule: moved(folder), train, dtype }
    }

    fn titan(folder: &Folder, job: &Settings) -> Self {
        let (dtype, is_said) = match job.text("training.mixed_precision_param") {
            Some("float32") => ("f32", ""),
            Some(_) => ("bf16", ""),
            None => ("bf16", " is not set, and that is torchtitan's default"),
        };
        let from = format!("{}: training.mixed_precision_param{is_said}", job.file);
        Self {
            name: "torchtitan",
            schedule: moved(folder),
            train: vec![clip(job, "training.max_norm")],
            dtype: Line::known("param_dtype", string(dtype), from),
        }
    }

    /// A loop of the user's, which accelerate, Lightning and PyTorch save nothing of but the optimizer and its scheduler.
    fn other(folder: &Folder) -> Self {
        let place = "the largest norm, if the program clips: clip_grad_norm_, Lightning's gradient_clip_val, torchtitan's \
                     training.max_norm (1 if it is not set)";
        let dtype = match folder.dtype {
            Some(TensorType::F32) | None => Line::open(
                "param_dtype",
                string("bf16"),
                "if the program computes in it: mixed_precision, MixedPrecisionPolicy, autocast; its weights are in f32",
            ),
            Some(_) => of_weights(folder, "the dtype of the weights"),
        };
        let train = vec![Line::open("grad_clip", "1.0", place)];
        Self { name: "PyTorch", schedule: moved(folder), train, dtype }
    }

    /// The learning rate that a group of the run file has: that before the schedule, or that of the judged step.
    pub(super) fn rate(&self, settings: &BTreeMap<String, Value>) -> Option<f64> {
        match self.schedule {
            Schedule::Shape { base, .. } => settings.get("initial_lr").and_then(number).or(base),
            _ => settings.get("lr").and_then(number),
        }
    }

    /// Where [`Program::rate`] is from.
    pub(super) fn rate_from(&self, settings: &BTreeMap<String, Value>) -> &'static str {
        match self.schedule {
            Schedule::Shape { .. } if settings.contains_key("initial_lr") => {
                "the optimizer's param_groups: initial_lr, the rate before the schedule"
            }
            Schedule::Shape { .. } => "the settings of the program: the rate before the schedule",
            Schedule::Moved { .. } => "the optimizer's param_groups: lr, as the scheduler has left it",
            Schedule::Unknown => {
                "check it: the optimizer's param_groups have it, and it may be that of the step before"
            }
        }
    }

    /// The last step and the schedule, of a state after `steps` steps.
    pub(super) fn schedule_lines(&self, steps: Option<u64>) -> Vec<Line> {
        let example = r#"{ name = "warmup-cosine", warmup_steps = 100, start_factor = 0 }"#;
        let judged = steps.map_or(1, |steps| steps + 1);
        let up_to = Line::known("steps", judged, "the number of the judged step");
        match &self.schedule {
            Schedule::Shape { text, from, steps, steps_from, .. } => {
                vec![Line::known("steps", steps, *steps_from), Line::known("lr_schedule", text, from)]
            }
            // A scheduler that counts epochs, or that had not moved on yet, has another rate in the judged step.
            Schedule::Moved { moved: Some(moved), from }
                if steps.is_some_and(|steps| *moved < steps as f64) =>
            {
                let what = format!(
                    "{from} has counted {moved} of {judged} steps, so lr may be that of the step before; set lr to that of \
                     the judged step, or write the whole schedule"
                );
                vec![up_to, Line::open("lr_schedule", example, what)]
            }
            Schedule::Moved { from, .. } => {
                let what = format!(
                    "{from} has only the rate of this step; to judge the schedule, write it with its steps and lr"
                );
                vec![up_to, Line::known("lr_schedule", r#"{ name = "constant" }"#, what)]
            }
            Schedule::Unknown => {
                let what = "the folder has no scheduler: without this line, lr stays as it is; set lr and steps, too";
                vec![up_to, Line::open("lr_schedule", example, what)]
            }
        }
    }

    /// Whether the run file has the whole schedule.
    pub(super) fn has_shape(&self) -> bool {
        matches!(self.schedule, Schedule::Shape { .. })
    }
}

/// What a scheduler's state says.
fn moved(folder: &Folder) -> Schedule {
    match &folder.scheduler {
        Some(scheduler) => {
            let moved = scheduler.number("last_epoch");
            Schedule::Moved { moved, from: scheduler.file.clone() }
        }
        None => Schedule::Unknown,
    }
}

/// The largest norm of gradients under a key; none if it is 0.
fn clip(settings: &Settings, key: &str) -> Line {
    let from = format!("{}: {key}", settings.file);
    match settings.number(key) {
        Some(norm) if norm > 0.0 => Line::known("grad_clip", lines::number(norm), from),
        _ => Line::note(format!("no grad_clip: {from} is not above 0")),
    }
}

/// The dtype in which a program computes that has no setting for it: that of its weights.
fn of_weights(folder: &Folder, reason: &str) -> Line {
    let name = match folder.dtype {
        Some(TensorType::Bf16) => "bf16",
        Some(TensorType::F16) => "f16",
        Some(TensorType::F64) => "f64",
        _ => "f32",
    };
    Line::known("param_dtype", string(name), format!("{reason}: the weights are in it"))
}

/// The schedule of a Trainer, if a run file can have it. Names and defaults are those of `transformers.optimization`.
fn trainer_schedule(arguments: &Settings, state: Option<&Settings>) -> Option<Schedule> {
    let (steps, steps_from) = match state.and_then(|state| state.number("max_steps")) {
        Some(steps) => (steps, "trainer_state.json: max_steps"),
        None => (arguments.number("max_steps").filter(|steps| *steps > 0.0)?, "training_args.bin: max_steps"),
    };
    let given = arguments.number("warmup_steps").unwrap_or(0.0);
    let share = if given > 0.0 { given } else { arguments.number("warmup_ratio").unwrap_or(0.0) };
    let warmup = if share >= 1.0 { share.floor() } else { (steps * share).ceil() };
    let option = |key: &str| arguments.number(&format!("lr_scheduler_kwargs.{key}"));
    let is_half = option("num_cycles").is_none_or(|cycles| cycles == 0.5);
    let (name, more) = match arguments.text("lr_scheduler_type")? {
        "constant" => return Some(shape(arguments, (steps, steps_from), "constant", "", 0.0)),
        "constant_with_warmup" => ("constant", String::new()),
        "linear" => ("linear", String::new()),
        "cosine" if is_half => ("warmup-cosine", String::new()),
        "cosine_with_restarts" => {
            ("cosine-with-restarts", format!(", cycles = {}", option("num_cycles").unwrap_or(1.0)))
        }
        "polynomial" if option("power").is_none_or(|power| power == 1.0) => {
            ("linear", format!(", min_lr = {}", lines::number(option("lr_end").unwrap_or(1e-7))))
        }
        "inverse_sqrt" => {
            ("inverse-sqrt", option("timescale").map_or_else(String::new, |t| format!(", timescale = {t}")))
        }
        "cosine_with_min_lr" if is_half => {
            let (key, min) = match option("min_lr") {
                // A schedule that rises has no form in a run file.
                Some(min) if arguments.number("learning_rate").is_some_and(|lr| min > lr) => return None,
                Some(min) => ("min_lr", min),
                None => ("min_lr_ratio", option("min_lr_rate")?),
            };
            ("warmup-cosine", format!(", {key} = {}", lines::number(min)))
        }
        _ => return None,
    };
    Some(shape(arguments, (steps, steps_from), name, &more, warmup))
}

fn shape(
    arguments: &Settings,
    (steps, steps_from): (f64, &'static str),
    name: &str,
    more: &str,
    warmup: f64,
) -> Schedule {
    let text = match warmup {
        0.0 => format!("{{ name = \"{name}\"{more} }}"),
        warmup => format!("{{ name = \"{name}\", warmup_steps = {warmup}, start_factor = 0{more} }}"),
    };
    let kind = arguments.text("lr_scheduler_type").unwrap_or_default();
    let from = format!("{}: lr_scheduler_type = {kind}, and its warm-up", arguments.file);
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a number of steps")]
    let steps = steps as u64;
    Schedule::Shape { text, from, steps, steps_from, base: arguments.number("learning_rate") }
}

#[cfg(test)]
mod tests;
