//! Adapters: small matrices that are trained beside a frozen model (LoRA: Hu et al., 2021), and lengths of its rows (DoRA: Liu
//! et al., 2024).
//!
//! [`adapt`] adds them to the linear maps that the run file names, and to those of experts (`stacks`). From then on they are
//! ordinary parameters, and frozen parameters need neither gradients nor optimizer state. A run exports the adapters in PEFT's
//! format ([`peft`]) and, on request, the merged model. Checkpoints hold the adapters, their optimizer state and a digest of the
//! base; a resumed run reads the base from its original files.

pub mod peft;
pub(crate) mod stacks;

use std::collections::BTreeSet;
use std::ops::Range;

use fsdp_config::{AdapterConfig, Quantize, Resolved, Targets, nearest};
use fsdp_core::DType;
use fsdp_core::model::{ModelSpec, ParamId, ParamSpec};
use fsdp_core::program::Pass;
use fsdp_nn::backend::HeadChunks;
use fsdp_nn::cuts::Cuts;
use fsdp_nn::footprint::RunShape;
use fsdp_nn::layer::{Description, ExpertMaps, Lora};
use fsdp_nn::listing::listings;
use fsdp_nn::model::{Adapted, Architecture};
use fsdp_nn::op::LossTerms;
use fsdp_nn::quantized::Format;

use crate::error::TrainError;
use crate::rule;

const KEEP_F32: &str = "fsdp.keep_f32";
const TARGET_MODULES: &str = "adapter.target_modules";
const TARGET_PARAMETERS: &str = "adapter.target_parameters";
const MODULES_TO_SAVE: &str = "adapter.modules_to_save";

/// Returns a model with the adapters of the run file, if any, and with the parameters kept in f32 that it names.
///
/// # Errors
/// [`TrainError::Misfit`]: names that match no parameter or module, or that are given twice; parameters that cannot be kept in
/// f32; a rank that no target can use; weights that cannot be quantized.
pub fn adapt<A: Architecture>(config: &Resolved, base: A) -> Result<Adapted<A>, TrainError> {
    let mut description = base.description().clone();
    if let Some(patterns) = &config.fsdp.keep_f32 {
        keep_f32(&mut description.spec, &base, patterns)?;
    }
    let Some(adapter) = &config.adapter else { return Ok(Adapted::new(base, description)) };
    let targets = targets(&description, &adapter.target_modules)?;
    let trained = trained(&description.spec, &adapter.modules_to_save)?;
    let stacks = target_stacks(&description, &adapter.target_parameters)?;
    let expect = |key, name: &str, weights: &[ParamId]| {
        if weights.iter().all(|weight| !trained.contains(weight)) {
            return Ok(());
        }
        let reason = format!(
            "`{name}` is one of {key} too; a module gets an adapter or is trained whole, so remove it from one of the two"
        );
        Err(TrainError::Misfit { key: MODULES_TO_SAVE, reason })
    };
    let mut sizes: Vec<(&str, [usize; 2])> = Vec::new();
    for &target in &targets {
        let (module, layer) = description.linears[target];
        let name = &description.spec.modules[module].fqn;
        expect(TARGET_MODULES, name, &[layer.weight])?;
        sizes.push((name.as_str(), [layer.inputs, layer.outputs]));
    }
    for (name, maps) in &stacks {
        for ExpertMaps { weights, dims, .. } in &description.experts[maps.clone()] {
            expect(TARGET_PARAMETERS, name, weights)?;
            sizes.push((name, [dims.inputs, dims.outputs]));
        }
    }
    expect_rank(&sizes, adapter.rank)?;
    let AdapterConfig { rank, dropout, dora, .. } = *adapter;
    let lora = Lora { rank, scale: adapter.scale(), dropout, dora };
    description.adapt(&targets, &trained, lora);
    stacks.into_iter().for_each(|(_, maps)| description.adapt_experts(maps, lora));
    quantize(&mut description, adapter.quantize)?;
    Ok(Adapted::new(base, description))
}

/// Keeps the parameters in f32 that match, and no others, if the model's operations can be computed so.
fn keep_f32(spec: &mut ModelSpec, base: &impl Architecture, patterns: &[String]) -> Result<(), TrainError> {
    let (kept, head) = (rule::matching(spec, KEEP_F32, patterns)?, base.head().weight);
    let misfit = |reason: String| TrainError::Misfit { key: KEEP_F32, reason };
    if kept.contains(&head) {
        let name = &spec.param(head).fqn;
        let reason = format!("`{name}` is the weight of the output head, which computes in fsdp.param_dtype");
        return Err(misfit(reason));
    }
    let params = spec.params.iter_mut().enumerate();
    params.for_each(|(id, param)| param.keep_f32 = kept.contains(&ParamId(id)));
    let shape = RunShape {
        samples: 1,
        seq: 1,
        dtype: DType::Bf16,
        gradient_dtype: DType::F32,
        head_chunks: HeadChunks::Small,
        terms: LossTerms::default(),
        packed: false,
        cuts: Cuts::WHOLE,
    };
    listings(base, spec, shape, Pass::Evaluate).map(drop).map_err(|error| misfit(error.to_string()))
}

/// Quantizes what is frozen.
fn quantize(description: &mut Description, quantize: Quantize) -> Result<(), TrainError> {
    let format = match quantize {
        Quantize::None => return Ok(()),
        Quantize::Nf4 => Format::Nf4,
        Quantize::Nf4Single => Format::Nf4Single,
        Quantize::Mxfp4 => Format::Mxfp4,
    };
    let refused = |reason: String| Err(TrainError::Misfit { key: "adapter.quantize", reason });
    if let Err((name, why)) = description.quantize(format) {
        return refused(format!("`{name}` {why}; set it to \"none\""));
    }
    if description.quantized.is_empty() {
        return refused("no frozen weight is kept in this format; MXFP4 is for experts, use \"nf4\"".into());
    }
    Ok(())
}

/// Checks that the model has adapters if and only if the run file has.
///
/// # Errors
/// [`TrainError::Misfit`].
pub(crate) fn expect(config: &Resolved, description: &Description) -> Result<(), TrainError> {
    if config.adapter.is_none() == (description.added == 0) {
        return Ok(());
    }
    let reason =
        "the model of the job was not adapted as the run file specifies (fsdp_train::adapter::adapt)";
    Err(TrainError::Misfit { key: "adapter", reason: reason.to_owned() })
}

/// Whether the merged model is exported too.
pub(crate) fn merges(config: &Resolved) -> bool {
    config.adapter.as_ref().is_some_and(|adapter| adapter.merge)
}

/// Whether one rank assembles what all have exported: a merged model, or stacked adapters of experts.
pub(crate) fn assembles(config: &Resolved) -> bool {
    let of_experts = config.adapter.as_ref().is_some_and(|adapter| !adapter.target_parameters.is_empty());
    of_experts || merges(config)
}

/// Whether `name` denotes the module: it equals the module's name or its last dotted parts (as in PEFT).
fn is_called(module: &str, name: &str) -> bool {
    module.strip_suffix(name).is_some_and(|before| before.is_empty() || before.ends_with('.'))
}

/// The last dotted part of a name.
fn last_part(name: &str) -> &str {
    name.rsplit('.').next().unwrap_or(name)
}

/// Indices of the linear maps to adapt.
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
            let why =
                if found { "is not a linear map inside the model" } else { "is not a module of the model" };
            return Err(unknown(TARGET_MODULES, name, why, &all));
        }
    }
    let is_target = |module: &&str| names.iter().any(|name| is_called(module, name));
    Ok((0..all.len()).filter(|&index| is_target(&all[index])).collect())
}

/// The stacks of experts to adapt: their names, and their maps.
fn target_stacks(
    description: &Description,
    names: &[String],
) -> Result<Vec<(String, Range<usize>)>, TrainError> {
    let mut all = stacks::of_maps(description);
    for name in names {
        if !all.iter().any(|(stack, _)| is_called(stack, name)) {
            let all: Vec<&str> = all.iter().map(|(stack, _)| stack.as_str()).collect();
            let why = "is not a stack of the weights of a model's experts";
            return Err(unknown(TARGET_PARAMETERS, name, why, &all));
        }
    }
    all.retain(|(stack, _)| names.iter().any(|name| is_called(stack, name)));
    Ok(all)
}

/// The parameters of modules that are trained whole. A tied parameter belongs to every module that has a name for it.
fn trained(spec: &ModelSpec, names: &[String]) -> Result<BTreeSet<ParamId>, TrainError> {
    let mut trained = BTreeSet::new();
    for name in names {
        let modules = spec.modules.iter().filter(|module| is_called(&module.fqn, name));
        let inside: Vec<ParamId> = modules.flat_map(|module| params_of(spec, &module.fqn)).collect();
        if inside.is_empty() {
            let all: Vec<&str> = spec.modules.iter().map(|module| module.fqn.as_str()).collect();
            return Err(unknown(MODULES_TO_SAVE, name, "is not a module of the model with parameters", &all));
        }
        let before = trained.len();
        let new: BTreeSet<ParamId> = inside.into_iter().collect();
        let count = new.len();
        trained.extend(new);
        if trained.len() < before + count {
            let reason = format!("`{name}` shares parameters with another of these modules; name them once");
            return Err(TrainError::Misfit { key: MODULES_TO_SAVE, reason });
        }
    }
    Ok(trained)
}

/// The parameters whose name, or an alias of it, is inside the module.
fn params_of<'a>(spec: &'a ModelSpec, module: &'a str) -> impl Iterator<Item = ParamId> + 'a {
    let is_inside = move |name: &String| name.strip_prefix(module).is_some_and(|rest| rest.starts_with('.'));
    let params = spec.params.iter().enumerate();
    params
        .filter(move |(_, param)| std::iter::once(&param.fqn).chain(&param.aliases).any(is_inside))
        .map(|(id, _)| ParamId(id))
}

fn unknown(key: &'static str, name: &str, why: &str, all: &[&str]) -> TrainError {
    let mut names: Vec<&str> = all.iter().map(|name| last_part(name)).collect();
    names.retain(|name| !name.is_empty() && !name.bytes().all(|byte| byte.is_ascii_digit()));
    names.sort_unstable();
    names.dedup();
    let hint = match nearest(last_part(name), &names).filter(|near| *near != last_part(name)) {
        Some(near) => format!("did you mean `{near}`?"),
        None if names.is_empty() => "this model has none".to_owned(),
        None => format!("there are {}", names.join(", ")),
    };
    TrainError::Misfit { key, reason: format!("`{name}` {why}; {hint}") }
}

/// Checks that some target can use the rank. As in PEFT, narrower ones have matrices of that rank too: gates of shared experts
/// have one output.
fn expect_rank(targets: &[(&str, [usize; 2])], rank: usize) -> Result<(), TrainError> {
    let usable = |(_, sizes): &&(&str, [usize; 2])| sizes[0].min(sizes[1]);
    let Some(widest) = targets.iter().rev().max_by_key(usable).filter(|widest| usable(widest) < rank) else {
        return Ok(());
    };
    let (max, (name, [inputs, outputs])) = (usable(&widest), widest);
    let reason = format!(
        "{rank} is more than {max}, all that the widest target `{name}` ({inputs} to {outputs}) can use; choose a lower one"
    );
    Err(TrainError::Misfit { key: "adapter.rank", reason })
}

/// The names under which a parameter is exported: with an adapter, PEFT's names of trained parameters only; without
/// one, the parameter's own name.
pub(crate) fn exported_names(adapter: Option<&AdapterConfig>, param: &ParamSpec) -> Vec<String> {
    match adapter {
        None => vec![param.fqn.clone()],
        Some(_) if param.trainable => peft::names(param).collect(),
        Some(_) => Vec::new(),
    }
}
