//! Resuming from checkpoints of other trainers: PyTorch's distributed checkpoints, folders of accelerate and of the
//! transformers Trainer, DeepSpeed, PyTorch/XLA. `fsdp-ckpt` maps tensors to parameters; this module decides whether a
//! run can start from them, and reports what was taken, derived and missing.
//!
//! A run has a single step count, from which learning rates and the position in the data follow. That count is the
//! optimizer's own: the highest, if it counts the steps of each parameter. Parameters that have missed steps, or have no
//! state at all because they were frozen or never had a gradient, continue with their own counts, as in `torch.optim`.
//! What a trainer saved of its schedule and its data is ignored.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use fsdp_ckpt::formats;
use fsdp_ckpt::safetensors::TensorType;
use fsdp_ckpt::training::{Count, Found, StateRows, Wanted};
use fsdp_ckpt::transfer::{NoProgress, Options};
use fsdp_config::OptimizerConfig;
use fsdp_core::Memory;
use fsdp_core::engine::{Engine, Origin};
use fsdp_core::model::ParamId;
use fsdp_core::program::Program;
use fsdp_core::update::StateTensor;

use super::run_state::{Change, other_run};
use super::settings;
use super::table::{STEPS, StateTable, rows_of, state_rows};
use crate::adapter::peft::{self, PeftConfig};
use crate::error::TrainError;
use crate::init::{self, InitSource};
use crate::job::Job;
use crate::rule::{self, LateParams};

/// A checkpoint of another trainer, with tensors that fit the run.
#[derive(Debug)]
pub struct Foreign {
    path: PathBuf,
    found: Found,
    /// For each parameter, the names of its optimizer states, in the order of the tensors found.
    states: Vec<Vec<String>>,
    settings: AdapterSettings,
}

/// What a checkpoint says of the settings of adapters, of which tensors show only the rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AdapterSettings {
    /// There are no adapters.
    None,
    /// An `adapter_config.json` beside the tensors agrees with the run file.
    Agree,
    /// There is no such file.
    Unknown,
}

/// What a run took from another trainer's checkpoint, as text for the user.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ImportSummary {
    /// The format of the checkpoint.
    pub format: String,
    /// Parts that were taken as they are.
    pub taken: Vec<String>,
    /// Parts that were derived from something else.
    pub derived: Vec<String>,
    /// Parts that the checkpoint lacks, and their replacements.
    pub missing: Vec<String>,
    /// Names in the checkpoint that were not used.
    pub unused: Vec<String>,
    /// Oddities of the checkpoint.
    pub notes: Vec<String>,
}

impl Foreign {
    /// Opens a checkpoint and locates everything that training needs. Reads only metadata.
    ///
    /// # Errors
    /// [`TrainError::Checkpoint`]: not a checkpoint, damaged, or with tensors that do not match the model;
    /// [`TrainError::Input`], [`TrainError::Misfit`]: adapters with other settings, or without a base.
    pub(crate) fn open<A>(job: &Job<A>, table: &StateTable, path: &Path) -> Result<Self, TrainError> {
        let wanted = wanted(job, table)?;
        let settings = adapter_settings(job, path)?;
        let found = Found::new(formats::open(path)?, &wanted)?;
        if settings != AdapterSettings::None && job.init.base_digest().is_none() {
            let reason = format!(
                "{} holds adapters without their base, which therefore cannot be random; set model.init = \"pretrained\" \
                 and model.path to its weights",
                path.display()
            );
            return Err(TrainError::Misfit { key: "model.init", reason });
        }
        let names = |wanted: Wanted| wanted.states.into_iter().map(|(name, _)| name).collect();
        let states = wanted.into_iter().map(names).collect();
        Ok(Self { path: path.to_owned(), found, states, settings })
    }

    /// Whether the checkpoint has no state of an optimizer, although the rule of the run has one.
    pub(crate) fn lacks_state(&self) -> bool {
        self.found.states.is_none() && self.states.iter().any(|states| !states.is_empty())
    }

    /// The path passed to [`Foreign::open`].
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the number of steps done, and the parameters that have missed some. The number is the highest count of
    /// the optimizer, else the user's (`at_step`), else the trainer's.
    ///
    /// # Errors
    /// [`TrainError::Input`] for counts that are missing or contradict each other, and tied parameters that differ;
    /// [`TrainError::Checkpoint`] for counts that cannot be read.
    pub(crate) fn steps<A>(
        &self,
        job: &Job<A>,
        at_step: Option<u64>,
        stop: &AtomicBool,
        summary: &mut ImportSummary,
    ) -> Result<(u64, LateParams), TrainError> {
        let options = Options::new(&NoProgress, stop);
        if let Some([first, second]) = self.found.tied_difference(&options)? {
            return Err(init::tied_differ(&self.path, [&first, &second]));
        }
        let mut rows = StateRows::new(&self.found, options)?;
        let mut read = |count: &Option<Count>| count.as_ref().map(|one| one.read(&mut rows)).transpose();
        let counts = self.found.counts.iter().map(&mut read);
        let counts = counts.collect::<Result<Vec<Option<u64>>, _>>()?;
        let trainer = self.found.run_count();
        let trainer = read(&trainer)?.zip(trainer);
        let step = self.step(&counts, at_step, trainer, summary)?;
        let overwrites_state =
            matches!(job.config.train.optimizer, OptimizerConfig::Sgd(_) | OptimizerConfig::ScheduleFree(_));
        if step == 0 && overwrites_state && (0..self.states.len()).any(|index| self.is_held(index)) {
            return Err(TrainError::Input(format!(
                "{}: 0 steps, but its optimizer has momenta; pass --at-step N with the number of steps done",
                self.path.display()
            )));
        }
        let late = |(index, states): (usize, &Vec<String>)| {
            let counted = match self.is_fresh(index) {
                true => 0,
                false => counts[index].unwrap_or(step),
            };
            let name = || job.plan.spec.params[index].fqn.clone();
            (!states.is_empty() && counted < step).then(|| (name(), step - counted))
        };
        Ok((step, self.states.iter().enumerate().filter_map(late).collect()))
    }

    /// The steps of the run, from the counts of all parameters, the user and the trainer.
    fn step(
        &self,
        counts: &[Option<u64>],
        at_step: Option<u64>,
        trainer: Option<(u64, Count)>,
        summary: &mut ImportSummary,
    ) -> Result<u64, TrainError> {
        let counted = counts.iter().zip(&self.found.counts);
        let counted = counted.filter_map(|(steps, count)| Some(((*steps)?, count.as_ref()?.name.clone())));
        // The first of several equal counts.
        let highest = counted.reduce(|highest, other| if other.0 > highest.0 { other } else { highest });
        let (step, from) = match (highest, at_step, &trainer) {
            (Some((counted, tensor)), Some(given), _) if counted != given => {
                return Err(other_count(&self.path, given, (&tensor, counted)));
            }
            (Some((counted, tensor)), ..) => (counted, tensor),
            (None, Some(given), _) => {
                summary.derived.push(format!("step {given} (--at-step)"));
                return Ok(given);
            }
            (None, None, Some((step, count))) => (*step, count.name.clone()),
            (None, None, None) => {
                let path = self.path.display();
                let message = format!("{path} does not record how many steps were done; pass --at-step N");
                return Err(TrainError::Input(message));
            }
        };
        if let Some((other, count)) = trainer.filter(|(other, _)| *other != step) {
            summary.notes.push(format!("{} counts {other} steps; the optimizer's count is used", count.name));
        }
        summary.taken.push(format!("step {step} ({from})"));
        Ok(step)
    }

    /// The parameters that this run trains, and of which the optimizer has no state.
    pub(crate) fn fresh<'a, A>(&self, job: &'a Job<A>) -> impl Iterator<Item = &'a str> {
        let params = job.plan.spec.params.iter().enumerate();
        params.filter(|(index, _)| self.is_fresh(*index)).map(|(_, param)| &*param.fqn)
    }

    /// Whether the optimizer has no state of a parameter that this run trains.
    fn is_fresh(&self, param: usize) -> bool {
        let held = self.found.states.as_ref().map(|states| &states[param]);
        held.is_some_and(Vec::is_empty) && !self.states[param].is_empty()
    }

    /// Whether the optimizer has states of a parameter that this run trains.
    fn is_held(&self, param: usize) -> bool {
        !self.states[param].is_empty() && !self.is_fresh(param)
    }

    /// Describes the checkpoint, except for its step.
    pub(crate) fn summary<A>(&self, job: &Job<A>) -> ImportSummary {
        let mut summary =
            ImportSummary { format: self.found.checkpoint.format.clone(), ..ImportSummary::default() };
        let taken = self.found.weights.iter().flatten().count();
        summary.taken.push(format!("{taken} parameters"));
        let held = (0..self.states.len()).filter(|&index| self.is_held(index)).count();
        if let Some(states) = self.states.iter().find(|states| !states.is_empty()) {
            summary.taken.push(format!("{} of {held}", states.join(", ")));
        }
        if !self.found.wrappers.is_empty() {
            let all: Vec<String> = self.found.wrappers.iter().map(|step| format!("{step}.")).collect();
            summary.derived.push(format!("names without {}", all.join(", ")));
        }
        if self.found.is_numbered {
            let order = "names of the optimizer's numbered states, from the order of the model's parameters";
            summary.derived.push(order.to_owned());
        }
        if self.found.settings.iter().all(std::collections::BTreeMap::is_empty) {
            summary.missing.push("settings of the optimizer: those of the run file apply".to_owned());
        }
        if self.settings == AdapterSettings::Unknown {
            let adapter = job.config.adapter.as_ref().expect("the run has adapters");
            summary.missing.push(format!(
                "alpha and rslora of the adapters, which no {} beside it shows: those of the run file apply \
                 (adapter.alpha = {}, adapter.rslora = {})",
                peft::CONFIG_FILE,
                adapter.alpha,
                adapter.rslora
            ));
        }
        summary.missing.push("random state: dropout follows from the seed and the step".to_owned());
        summary.unused.clone_from(&self.found.unused);
        summary.notes.clone_from(&self.found.checkpoint.notes);
        if self.settings != AdapterSettings::None {
            add_base(&mut summary, job);
        }
        summary
    }

    /// Compares the run file with the settings saved by the optimizer.
    ///
    /// # Errors
    /// [`TrainError::Input`] for settings that amount to another update rule.
    pub(crate) fn changes<A>(&self, job: &Job<A>, step: u64) -> Result<Vec<Change>, TrainError> {
        let groups = rule::settings(&job.config.train.optimizer, &job.plan.spec)?;
        let compared = settings::compare(job, &groups, &self.found.settings, step);
        compared.map_err(|differences| other_run(&self.path, &differences))
    }

    /// Fills an engine with parameters and optimizer state, and verifies the checksums of what it read. The base of
    /// adapters comes from `init`.
    ///
    /// # Errors
    /// [`TrainError::Checkpoint`]: a file that is missing or damaged.
    pub(crate) fn restore<M: Memory, P: Program<M>>(
        &self,
        engine: &mut Engine<M, P>,
        init: &InitSource,
        stop: &AtomicBool,
    ) -> Result<(), TrainError> {
        let (spec, reads) = (engine.plan().spec.clone(), engine.reads());
        let open = || StateRows::new(&self.found, Options::new(&NoProgress, stop));
        let mut rows = reads.then(open).transpose()?;
        let mut read = |name: &str, range, values: &mut [f64]| -> Result<(), TrainError> {
            let rows = rows.as_mut().expect("only ranks that read are asked for values");
            Ok(rows.read_rows_f64(name, range, values)?)
        };
        engine.load_params(Origin::Read, |piece, values| {
            let param = spec.param(piece.param);
            let Some(name) = &self.found.weights[piece.param.0] else {
                return init.fill(&spec, piece, values);
            };
            read(name, rows_of(param, piece.param_offset, piece.len), values)
        })?;
        engine.load_state(Origin::Read, |tensor: &StateTensor, piece, values| {
            if self.is_fresh(piece.param.0) {
                values.fill(0.0);
                return Ok(());
            }
            let name = self.state_of(piece.param.0, tensor.name);
            read(name, state_rows(spec.param(piece.param), piece), values)
        })?;
        Ok(rows.map_or(Ok(()), StateRows::finish)?)
    }

    /// Opens the tensors for reading.
    ///
    /// # Errors
    /// [`TrainError::Checkpoint`]: a file that is missing or damaged.
    pub(crate) fn rows<'a>(&'a self, stop: &'a AtomicBool) -> Result<StateRows<'a>, TrainError> {
        Ok(StateRows::new(&self.found, Options::new(&NoProgress, stop))?)
    }

    /// The saved settings of the group of each parameter, under PyTorch's names; empty for a parameter in no group.
    pub(crate) fn settings(&self) -> &[std::collections::BTreeMap<String, fsdp_ckpt::checkpoint::Value>] {
        &self.found.settings
    }

    /// The name and dtype of the tensor with the values of a parameter; `None` if they are read elsewhere, as those of the
    /// base of adapters.
    pub(crate) fn weight(&self, param: ParamId) -> Option<(&str, TensorType)> {
        let name = self.found.weights[param.0].as_deref()?;
        Some((name, self.found.checkpoint.tensors[name].dtype))
    }

    /// The name and dtype of the tensor with a state of a parameter; `None` if the rule or the optimizer has none.
    pub(crate) fn state(&self, param: ParamId, state: &str) -> Option<(&str, TensorType)> {
        if !self.is_held(param.0) || !self.states[param.0].iter().any(|known| known == state) {
            return None;
        }
        let name = self.state_of(param.0, state);
        Some((name, self.found.checkpoint.tensors[name].dtype))
    }

    /// The name and dtype of the tensor with a state that the rule of the run does not have, beside those that it has.
    pub(crate) fn other_state(&self, param: ParamId, state: &str) -> Option<(&str, TensorType)> {
        let known = self.states[param.0].first()?;
        let name = self.state(param, known)?.0.strip_suffix(known.as_str())?.to_owned() + state;
        let (name, tensor) = self.found.checkpoint.tensors.get_key_value(&name)?;
        Some((name, tensor.dtype))
    }

    /// The name of the tensor that holds a state of a parameter.
    fn state_of(&self, param: usize, state: &str) -> &str {
        let index = self.states[param].iter().position(|name| name == state);
        let tensors = self.found.states.as_ref().expect("state is read where there is some");
        &tensors[param][index.expect("every state of the rule was looked for")]
    }
}

/// The error for steps given with `--at-step` that differ from a count in a checkpoint.
pub(crate) fn other_count(path: &Path, given: u64, (tensor, counted): (&str, u64)) -> TrainError {
    TrainError::Input(format!(
        "{}: --at-step {given}, but {tensor} counts {counted} steps, which the optimizer uses to correct its moments; omit \
         --at-step",
        path.display()
    ))
}

/// The names, shape and states to look for, for each parameter.
fn wanted<A>(job: &Job<A>, table: &StateTable) -> Result<Vec<Wanted>, TrainError> {
    let (optimizer, spec) = (&job.config.train.optimizer, &job.plan.spec);
    let groups = rule::settings(optimizer, spec)?;
    // Without weight decay here, the patterns still predict the groups of a trainer that used it.
    let no_decay = rule::matching(spec, "train.optimizer.no_decay", optimizer.no_decay())?;
    let would_decay = |id| optimizer.weight_decay() == 0.0 && !no_decay.contains(&id);
    let decays = |id| groups.of(id).weight_decay != 0.0 || would_decay(id);
    let states = |fqn: &str| {
        let prefix = format!("optim.state.{fqn}.");
        let specs = table.tensors.iter().map(|tensor| &tensor.spec);
        let named = specs.filter_map(|spec| Some((spec.name.strip_prefix(&prefix)?, &spec.shape)));
        let kept = named.filter(|(state, _)| *state != STEPS && !state.contains('.'));
        kept.map(|(state, shape)| (state.to_owned(), shape.clone())).collect()
    };
    let params = spec.params.iter().enumerate();
    Ok(params
        .map(|(index, param)| Wanted {
            names: init::names(param).map(str::to_owned).collect(),
            shape: param.shape.clone(),
            states: states(&param.fqn),
            decays: decays(ParamId(index)),
            // An average that begins with zeros would be wrong.
            may_lack_states: job.config.train.ema_decay.is_none(),
            is_base: job.config.adapter.is_some() && !param.trainable,
        })
        .collect())
}

/// Compares the settings of adapters with those that PEFT saves beside them.
fn adapter_settings<A>(job: &Job<A>, path: &Path) -> Result<AdapterSettings, TrainError> {
    let Some(adapter) = &job.config.adapter else { return Ok(AdapterSettings::None) };
    // A trainer's folder may hold the checkpoint in a folder of its own.
    let mut around = path.ancestors().take(2);
    let Some(dir) = around.find(|dir| dir.join(peft::CONFIG_FILE).is_file()) else {
        return Ok(AdapterSettings::Unknown);
    };
    PeftConfig::read(dir)?.expect(adapter)?;
    Ok(AdapterSettings::Agree)
}

/// Says where the base of the adapters is read from.
fn add_base<A>(summary: &mut ImportSummary, job: &Job<A>) {
    match job.init.taken_base() {
        None => summary.derived.push("the base of the adapters, from model.path".to_owned()),
        Some(base) => {
            summary.taken.push("the base of the adapters".to_owned());
            if base.differs {
                let note = "the weights in model.path are not the base of these adapters, and are not used";
                summary.notes.push(note.to_owned());
            }
        }
    }
}
