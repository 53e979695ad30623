//! Adapters: small matrices that are trained beside a frozen model (LoRA: Hu et al., 2021).
//!
//! [`adapt`] puts them beside the linear maps that the run file names; from there on they are parameters like all others,
//! and what is frozen costs neither gradients nor optimizer state. What a run exports is what PEFT saves
//! ([`peft`]), and on demand the model with its adapters added ([`merge`](mod@merge)). Checkpoints hold adapters, their state
//! and the digest of the base, which is read where it was read at first.

mod init;
pub mod merge;
pub mod peft;

use std::collections::BTreeSet;

use fsdp_core::model::{ModelSpec, ParamId, ParamSpec};
use fsdp_nn::layer::{Description, Linear, Lora};
use fsdp_nn::model::{Adapted, Architecture};

use crate::config::{AdapterConfig, Init, Resolved, Targets, nearest};
use crate::error::TrainError;

pub use init::AdaptedInit;

const TARGET_MODULES: &str = "adapter.target_modules";
const MODULES_TO_SAVE: &str = "adapter.modules_to_save";

/// A model with the adapters of a run file, or as it is if that has none.
///
/// # Errors
/// [`TrainError::Misfit`]: names that no module has or that are given twice, a rank beyond the sizes of a linear map.
pub fn adapt<A: Architecture>(config: &Resolved, base: A) -> Result<Adapted<A>, TrainError> {
    let Some(adapter) = &config.adapter else { return Ok(base.into()) };
    let mut description = base.description().clone();
    let targets = targets(&description, &adapter.target_modules)?;
    let trained = trained(&description.spec, &adapter.modules_to_save)?;
    for &target in &targets {
        let (module, layer) = description.linears[target];
        let name = &description.spec.modules[module].fqn;
        expect_rank(name, layer, adapter.rank)?;
        if trained.contains(&layer.weight) {
            let reason = format!(
                "`{name}` is one of adapter.target_modules too; a module gets an adapter or is trained whole, so \
                 remove it from one of the two"
            );
            return Err(TrainError::Misfit { key: MODULES_TO_SAVE, reason });
        }
    }
    let lora = Lora { rank: adapter.rank, scale: adapter.scale(), dropout: adapter.dropout };
    description.adapt(&targets, &trained, lora);
    Ok(Adapted::new(base, description))
}

/// That a model has adapters if the run file has, and files to be added to if they are to be merged.
///
/// # Errors
/// [`TrainError::Misfit`].
pub(crate) fn expect(config: &Resolved, description: &Description) -> Result<(), TrainError> {
    if merges(config) && config.model.init == Init::Random {
        let reason = "random weights (model.init) are in no file that adapters could be added to; remove the key, or \
                      set model.init = \"pretrained\"";
        return Err(TrainError::Misfit { key: "adapter.merge", reason: reason.to_owned() });
    }
    if config.adapter.is_none() == description.adapters.is_empty() {
        return Ok(());
    }
    let reason =
        "the model that the job was given was not adapted as the run file says (fsdp_train::adapter::adapt)";
    Err(TrainError::Misfit { key: "adapter", reason: reason.to_owned() })
}

/// Whether the model with its adapters added is exported too.
pub(crate) fn merges(config: &Resolved) -> bool {
    config.adapter.as_ref().is_some_and(|adapter| adapter.merge)
}

/// Whether a module is meant by a name: it is its own, or what its own ends with behind a dot (as in PEFT).
fn is_called(module: &str, name: &str) -> bool {
    module.strip_suffix(name).is_some_and(|before| before.is_empty() || before.ends_with('.'))
}

/// The last part of a name.
fn last_part(name: &str) -> &str {
    name.rsplit('.').next().unwrap_or(name)
}

/// The linear maps that are adapted, by number.
fn targets(description: &Description, targets: &Targets) -> Result<Vec<usize>, TrainError> {
    let all: Vec<&str> = description
        .linears
        .iter()
        .map(|(module, _)| description.spec.modules[*module].fqn.as_str())
        .collect();
    let Targets::Named(names) = targets else { return Ok((0..all.len()).collect()) };
    for name in names {
        if !all.iter().any(|module| is_called(module, name)) {
            let found = description.spec.modules.iter().any(|module| is_called(&module.fqn, name));
            let why = if found { "is no linear map inside the model" } else { "is no module of the model" };
            return Err(unknown(TARGET_MODULES, name, why, &all));
        }
    }
    let is_meant = |module: &&str| names.iter().any(|name| is_called(module, name));
    Ok((0..all.len()).filter(|&index| is_meant(&all[index])).collect())
}

/// The parameters of modules that are trained whole. A tied parameter is in all modules that have a name for it.
fn trained(spec: &ModelSpec, names: &[String]) -> Result<BTreeSet<ParamId>, TrainError> {
    let mut trained = BTreeSet::new();
    for name in names {
        let modules = spec.modules.iter().filter(|module| is_called(&module.fqn, name));
        let inside: Vec<ParamId> = modules.flat_map(|module| params_of(spec, &module.fqn)).collect();
        if inside.is_empty() {
            let all: Vec<&str> = spec.modules.iter().map(|module| module.fqn.as_str()).collect();
            return Err(unknown(
                MODULES_TO_SAVE,
                name,
                "is no module of the model that has parameters",
                &all,
            ));
        }
        let before = trained.len();
        let new: BTreeSet<ParamId> = inside.into_iter().collect();
        let count = new.len();
        trained.extend(new);
        if trained.len() < before + count {
            let reason =
                format!("`{name}` has parameters that another one of these modules has; name them once");
            return Err(TrainError::Misfit { key: MODULES_TO_SAVE, reason });
        }
    }
    Ok(trained)
}

/// The parameters that are called after a module.
fn params_of<'a>(spec: &'a ModelSpec, module: &'a str) -> impl Iterator<Item = ParamId> + 'a {
    let is_inside = move |name: &String| name.strip_prefix(module).is_some_and(|rest| rest.starts_with('.'));
    let params = spec.params.iter().enumerate();
    params
        .filter(move |(_, param)| std::iter::once(&param.fqn).chain(&param.aliases).any(is_inside))
        .map(|(id, _)| ParamId(id))
}

fn unknown(key: &'static str, name: &str, why: &str, modules: &[&str]) -> TrainError {
    let mut names: Vec<&str> = modules.iter().map(|module| last_part(module)).collect();
    names.retain(|name| !name.is_empty() && !name.bytes().all(|byte| byte.is_ascii_digit()));
    names.sort_unstable();
    names.dedup();
    let way_out = match nearest(last_part(name), &names).filter(|near| *near != last_part(name)) {
        Some(near) => format!("did you mean `{near}`?"),
        None => format!("there are {}", names.join(", ")),
    };
    TrainError::Misfit { key, reason: format!("`{name}` {why}; {way_out}") }
}

fn expect_rank(module: &str, layer: Linear, rank: usize) -> Result<(), TrainError> {
    let Linear { inputs, outputs, .. } = layer;
    let most = inputs.min(outputs);
    if rank <= most {
        return Ok(());
    }
    let reason = format!(
        "{rank} is more than the {most} that `{module}` ({inputs} to {outputs}) can have; choose a lower one"
    );
    Err(TrainError::Misfit { key: "adapter.rank", reason })
}

/// Under which names a parameter is exported: of an adapter what is trained, as PEFT calls it; else its own.
pub(crate) fn exported_names(adapter: Option<&AdapterConfig>, param: &ParamSpec) -> Vec<String> {
    match adapter {
        None => vec![param.fqn.clone()],
        Some(_) if param.trainable => peft::names(param).collect(),
        Some(_) => Vec::new(),
    }
}
