//! Checkpoints of models with LoRA adapters: those of PEFT, and converted ones of `fsdp`.

use std::path::Path;

use super::{ViewedModel, Wanted, names::is_constant};
use crate::{
    checkpoint::{Checkpoint, Copies, ExpertNames, Experts, Key, MAGNITUDE, Role, Source, join},
    error::Error,
    formats,
};

/// The end of the name of an adapter's first matrix, whose number of rows is the rank.
const FIRST_MATRIX: &str = ".lora_A.weight";

/// Returns a checkpoint with adapters under the names that the model has, if the model has adapters too.
///
/// # Errors
/// [`Error::BadRequest`] if only one of them has adapters, or if other parameters are trained beside them.
pub(super) fn without_peft(checkpoint: Checkpoint, wanted: &[Wanted]) -> Result<Checkpoint, Error> {
    let wants_adapters = wanted.iter().any(|one| one.names[0].ends_with(FIRST_MATRIX));
    let refused = |reason: String| Err(Error::bad_request(&checkpoint.path, reason));
    if let Some(name) = checkpoint.adapter_of_stack() {
        let reason = format!(
            "`{name}` adapts stacked experts (PEFT's target_parameters), whose states cannot be read one by one; save the adapter \
             alone and begin with it (adapter.path)"
        );
        return refused(reason);
    }
    if let Some([(first, one), (second, other)]) = different_ranks(&checkpoint) {
        let reason = format!(
            "its adapters have different ranks: {one} in `{first}`, {other} in `{second}` (PEFT's rank_pattern); adapter.rank is \
             one for all modules, so this run cannot be continued"
        );
        return refused(reason);
    }
    match (checkpoint.has_adapters(), wants_adapters) {
        (false, false) => return Ok(checkpoint),
        (true, true) => {}
        (true, false) => {
            let reason = format!(
                "it is of a model with adapters: set [adapter] with {}, and adapter.alpha and adapter.rslora to that \
                 run's lora_alpha and use_rslora",
                settings(&checkpoint)?
            );
            return refused(reason);
        }
        (false, true) => {
            let reason = "it holds no adapter (`lora_A`); remove [adapter] to continue the whole model, or set \
                          model.path to its weights to begin adapters with them";
            return refused(reason.to_owned());
        }
    }
    let trained = checkpoint.trained_beside_adapters();
    let is_trained = |name: &String| trained.iter().any(|one| is_called(one, name));
    let frozen = wanted.iter().filter(|one| one.is_base).find(|one| one.names.iter().any(is_trained));
    if let Some(frozen) = frozen {
        let reason = format!(
            "it trained `{}` in full beside the adapters, which this run freezes: add its module to \
             adapter.modules_to_save",
            frozen.names[0]
        );
        return refused(reason);
    }
    let has_names = checkpoint.has_base_of_adapters();
    let mut plain = checkpoint.without_peft(Copies::Trained)?;
    if has_names {
        plain.notes.push("names are read without those of PEFT's modules (base_layer, ..)".to_owned());
    }
    Ok(plain)
}

/// Two first matrices of adapters of different ranks, with these; `None` if all ranks are the same.
fn different_ranks(checkpoint: &Checkpoint) -> Option<[(&str, u64); 2]> {
    let of_model = checkpoint.tensors.iter().filter(|(_, tensor)| tensor.role == Role::Model);
    let mut ranks = of_model
        .filter(|(name, tensor)| name.contains(".lora_A.") && tensor.shape.len() == 2)
        .map(|(name, tensor)| (&name[..], tensor.shape[0]));
    let first = ranks.next()?;
    ranks.find(|(_, rank)| *rank != first.1).map(|other| [first, other])
}

/// Whether a name ends with another one, which begins where one of its steps does.
fn is_called(held: &str, name: &str) -> bool {
    held.strip_suffix(name).is_some_and(|before| before.is_empty() || before.ends_with('.'))
}

/// The settings of a run file that the tensors of adapters show.
fn settings(checkpoint: &Checkpoint) -> Result<String, Error> {
    let plain = checkpoint.clone().without_peft(Copies::Trained)?;
    let models = plain.tensors.values().filter(|tensor| tensor.role == Role::Model);
    let firsts: Vec<(String, u64)> = models
        .filter_map(|tensor| {
            let module = join(&tensor.path).strip_suffix(FIRST_MATRIX)?.to_owned();
            Some((module.rsplit('.').next()?.to_owned(), *tensor.shape.first()?))
        })
        .collect();
    let mut modules: Vec<String> = firsts.iter().map(|(module, _)| format!("\"{module}\"")).collect();
    modules.sort();
    modules.dedup();
    let rank = firsts.first().map_or(0, |(_, rank)| *rank);
    let mut text = format!("rank = {rank}, target_modules = [{}]", modules.join(", "));
    if plain.tensors.keys().any(|name| name.ends_with(MAGNITUDE)) {
        text += ", dora = true";
    }
    let trained = checkpoint.trained_beside_adapters();
    if !trained.is_empty() {
        let modules =
            trained.iter().map(|name| name.rsplit_once('.').map_or(&name[..], |(module, _)| module));
        let modules: Vec<String> = modules.map(|module| format!("\"{module}\"")).collect();
        text += &format!(", modules_to_save = [{}]", modules.join(", "));
    }
    Ok(text)
}

impl ViewedModel {
    /// Opens the base in a checkpoint of a model with adapters, under the names of a model without them; `None` if it
    /// has none, as in what PEFT itself saves. Experts are read one by one if the `names` of the model are of that form.
    ///
    /// # Errors
    /// Those of [`formats::open`]; [`Error::BadRequest`] for compressed items, whose rows cannot be read one by one.
    pub(super) fn base_in<'a>(
        path: &Path,
        names: impl Iterator<Item = &'a str>,
    ) -> Result<Option<ViewedModel>, Error> {
        let checkpoint = formats::open(path)?;
        if !checkpoint.has_adapters() || !checkpoint.has_base_of_adapters() {
            return Ok(None);
        }
        if checkpoint.sources.iter().any(Source::is_compressed) {
            let reason = "the base of its adapters is compressed; convert it first with `fsdp ckpt convert`";
            return Err(Error::bad_request(path, reason));
        }
        let mut base = checkpoint.without_peft(Copies::Base)?.strip_wrappers()?;
        base.values.clear();
        for (_, mut tensor) in std::mem::take(&mut base.tensors) {
            let Some(Key::Name(name)) = tensor.path.last().filter(|_| tensor.role == Role::Model) else {
                continue;
            };
            let is_adapter =
                name.contains(".lora_A.") || name.contains(".lora_B.") || name.ends_with(MAGNITUDE);
            if is_adapter || is_constant(name) {
                continue;
            }
            let name = name.clone();
            tensor.path = vec![Key::Name(name.clone())];
            base.tensors.insert(name, tensor);
        }
        if let Some(names) = ExpertNames::of_parameters(names).filter(|_| base.has_fused_experts()) {
            base = base.with_experts(Experts::Separate(names))?;
        }
        ViewedModel::of(base).map(Some)
    }
}
