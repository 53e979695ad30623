//! Resuming from checkpoints of other trainers: PyTorch's distributed checkpoints, folders of accelerate and of the
//! transformers Trainer, DeepSpeed, PyTorch/XLA. `fsdp-ckpt` maps tensors to parameters; this module decides whether a
//! run can start from them, and reports what was taken, derived and missing.
//!
//! A run has a single step count, from which bias corrections, learning rates and the position in the data follow. That
//! count is the optimizer's own; what a trainer saved of its schedule and its data is ignored.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use fsdp_ckpt::formats;
use fsdp_ckpt::training::{Count, Found, StateRows, Wanted};
use fsdp_ckpt::transfer::{NoProgress, Options};
use fsdp_core::Memory;
use fsdp_core::engine::{Engine, Origin};
use fsdp_core::model::ParamId;
use fsdp_core::program::Program;
use fsdp_core::update::StateTensor;

use super::run_state::Change;
use super::settings;
use super::table::{STEPS, StateTable, rows_of, state_rows};
use crate::error::TrainError;
use crate::init;
use crate::job::Job;
use crate::rule;

/// A checkpoint of another trainer, with tensors that fit the run.
#[derive(Debug)]
pub struct Foreign {
    path: PathBuf,
    found: Found,
    /// For each parameter, the names of its optimizer states, in the order of the tensors found.
    states: Vec<Vec<String>>,
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
    /// [`TrainError::NoOptimizerState`].
    pub(super) fn open<A>(job: &Job<A>, table: &StateTable, path: &Path) -> Result<Self, TrainError> {
        let wanted = wanted(job, table)?;
        let found = Found::new(formats::open(path)?, &wanted)?;
        let needs_state = wanted.iter().any(|param| !param.states.is_empty());
        if needs_state && found.states.is_none() {
            return Err(TrainError::NoOptimizerState { path: path.to_owned() });
        }
        let names = |wanted: Wanted| wanted.states.into_iter().map(|(name, _)| name).collect();
        Ok(Self { path: path.to_owned(), found, states: wanted.into_iter().map(names).collect() })
    }

    /// The path passed to [`Foreign::open`].
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the number of steps done: the optimizer's count, else the user's (`at_step`), else the trainer's.
    ///
    /// # Errors
    /// [`TrainError::OtherStep`], [`TrainError::AtStep`], [`TrainError::NoStep`], [`TrainError::TiedDiffer`];
    /// [`TrainError::Checkpoint`] for counts that cannot be read.
    pub(super) fn step(
        &self,
        at_step: Option<u64>,
        stop: &AtomicBool,
        summary: &mut ImportSummary,
    ) -> Result<u64, TrainError> {
        let options = Options::new(&NoProgress, stop);
        if let Some([first, second]) = self.found.tied_difference(&options)? {
            return Err(TrainError::TiedDiffer { path: self.path.clone(), first, second });
        }
        let mut rows = StateRows::new(&self.found, options)?;
        let counted = self.optimizer_step(&mut rows)?;
        let trainer = match self.found.run_count() {
            Some(count) => Some((whole_steps(&count, &self.path, &mut rows)?, count)),
            None => None,
        };
        let (step, from) = match (counted, at_step, &trainer) {
            (Some((counted, tensor)), Some(given), _) if counted != given => {
                return Err(TrainError::AtStep { path: self.path.clone(), counted, given, tensor });
            }
            (Some((counted, tensor)), ..) => (counted, tensor),
            (None, Some(given), _) => {
                summary.derived.push(format!("step {given} (--at-step)"));
                return Ok(given);
            }
            (None, None, Some((step, count))) => (*step, count.name.clone()),
            (None, None, None) => return Err(TrainError::NoStep { path: self.path.clone() }),
        };
        if let Some((other, count)) = trainer.filter(|(other, _)| *other != step) {
            summary.notes.push(format!("{} counts {other} steps; the optimizer's count is used", count.name));
        }
        summary.taken.push(format!("step {step} ({from})"));
        Ok(step)
    }

    /// The step on which all counts of the optimizer agree, with the name of one of these tensors; `None` if it counts
    /// none.
    fn optimizer_step(&self, rows: &mut StateRows<'_>) -> Result<Option<(u64, String)>, TrainError> {
        let mut agreed: Option<(u64, String)> = None;
        for count in &self.found.counts {
            let got = whole_steps(count, &self.path, rows)?;
            match &agreed {
                Some((expected, _)) if *expected != got => {
                    let (path, tensor) = (self.path.clone(), count.name.clone());
                    return Err(TrainError::OtherStep { path, tensor, expected: *expected, got: got as f64 });
                }
                _ => drop(agreed.get_or_insert_with(|| (got, count.name.clone()))),
            }
        }
        Ok(agreed)
    }

    /// Describes the checkpoint, except for its step.
    pub(super) fn summary<A>(&self, job: &Job<A>) -> ImportSummary {
        let spec = &job.plan.spec;
        let mut summary =
            ImportSummary { format: self.found.checkpoint.format.clone(), ..ImportSummary::default() };
        summary.taken.push(format!("{} parameters", spec.params.len()));
        let trained = self.states.iter().filter(|states| !states.is_empty()).count();
        if let Some(states) = self.states.iter().find(|states| !states.is_empty()) {
            summary.taken.push(format!("{} of {trained}", states.join(", ")));
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
        summary.missing.push("random state: dropout follows from the seed and the step".to_owned());
        summary.unused.clone_from(&self.found.unused);
        summary.notes.clone_from(&self.found.checkpoint.notes);
        summary
    }

    /// Compares the run file with the settings saved by the optimizer.
    ///
    /// # Errors
    /// [`TrainError::OtherRun`] for settings that amount to another update rule.
    pub(super) fn changes<A>(&self, job: &Job<A>, step: u64) -> Result<Vec<Change>, TrainError> {
        let groups = rule::settings(&job.config.train.optimizer, &job.plan.spec)?;
        let compared = settings::compare(job, &groups, &self.found.settings, step);
        compared.map_err(|differences| TrainError::OtherRun { path: self.path.clone(), differences })
    }

    /// Fills an engine with parameters and optimizer state, and verifies the checksums of what it read.
    ///
    /// # Errors
    /// [`TrainError::Checkpoint`]: a file that is missing or damaged.
    pub(crate) fn restore<M: Memory, P: Program<M>>(
        &self,
        engine: &mut Engine<M, P>,
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
            read(&self.found.weights[piece.param.0], rows_of(param, piece.param_offset, piece.len), values)
        })?;
        engine.load_state(Origin::Read, |tensor: &StateTensor, piece, values| {
            let name = self.state_of(piece.param.0, tensor.name);
            read(name, state_rows(spec.param(piece.param), piece), values)
        })?;
        Ok(rows.map_or(Ok(()), StateRows::finish)?)
    }

    /// The name of the tensor that holds a state of a parameter.
    fn state_of(&self, param: usize, state: &str) -> &str {
        let index = self.states[param].iter().position(|name| name == state);
        let tensors = self.found.states.as_ref().expect("state is read where there is some");
        &tensors[param][index.expect("every state of the rule was looked for")]
    }
}

/// Reads a count as a whole number of steps.
fn whole_steps(count: &Count, path: &Path, rows: &mut StateRows<'_>) -> Result<u64, TrainError> {
    let steps = count.read(rows)?;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it is compared")]
    let rounded = steps as u64;
    if rounded as f64 == steps {
        return Ok(rounded);
    }
    let (path, tensor) = (path.to_owned(), count.name.clone());
    Err(TrainError::OtherStep { path, tensor, expected: rounded, got: steps })
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
        })
        .collect())
}
