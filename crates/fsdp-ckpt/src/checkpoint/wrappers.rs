//! Removes the parts of parameter names that wrappers of PyTorch modules have added.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    Checkpoint, Key, OptimizerName, Role, Tensor, Value, join,
    optimizer_name::{parameter_span, with_parameter},
    role::has_model_step,
};
use crate::error::Error;

/// Steps of names that only wrappers add.
const WRAPPERS: [&str; 3] = ["_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"];

/// The prefix that `DistributedDataParallel` adds to all names. Elsewhere it is a module of the model.
const DDP: &str = "module";

/// The wrappers in the names of one checkpoint, in the order of a name: `_orig_mod.` (`torch.compile`), `module.` (DDP,
/// as a prefix only), `_fsdp_wrapped_module.` (FSDP1), `_checkpoint_wrapped_module.` (activation checkpointing).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wrappers {
    /// Whether a leading `module.` is DDP's: if it is, all names have it.
    of_ddp: bool,
}

impl Wrappers {
    /// Detects the wrappers in these names, which must be all names of a model.
    pub(crate) fn in_names<'a>(names: impl IntoIterator<Item = &'a str>) -> Wrappers {
        let mut names = names.into_iter().peekable();
        let is_of_ddp = |name: &str| split(name, true).1.contains(DDP);
        Wrappers { of_ddp: names.peek().is_some() && names.all(is_of_ddp) }
    }

    /// Returns a name without wrappers, and the wrappers removed.
    pub(crate) fn strip(self, name: &str) -> (String, BTreeSet<&'static str>) {
        split(name, self.of_ddp)
    }

    /// Returns a path without wrappers, and the wrappers removed. A leading key of the whole model, such as `model`,
    /// stays.
    pub(crate) fn strip_path(self, path: &[Key]) -> (Vec<Key>, BTreeSet<&'static str>) {
        let kept = usize::from(has_model_step(path));
        let name = join(&path[kept..]);
        let (stripped, found) = self.strip(&name);
        if found.is_empty() {
            return (path.to_vec(), found);
        }
        let mut path = path[..kept].to_vec();
        path.push(Key::Name(stripped));
        (path, found)
    }

    /// Returns the path of a tensor or value of any role without wrappers.
    pub(crate) fn strip_any(self, role: Role, path: &[Key]) -> Vec<Key> {
        match role {
            Role::Model => self.strip_path(path).0,
            Role::Optimizer => match parameter_span(path) {
                Some((step, range)) => {
                    let name = self.strip(&path[step].text()[range.clone()]).0;
                    with_parameter(path, (step, range), &name)
                }
                None => path.to_vec(),
            },
            Role::Other => path.to_vec(),
        }
    }

    /// Removes wrappers from a value: the parameter names of an optimizer's group.
    pub(crate) fn strip_value(self, path: &[Key], value: &Value) -> Value {
        let is_list_of_names = matches!(
            OptimizerName::of_path(path),
            Some(OptimizerName::GroupSetting { key, .. }) if key == "params"
        );
        let strip = |name: &Value| match name {
            Value::Str(name) => Value::Str(self.strip(name).0),
            other => other.clone(),
        };
        match value {
            Value::List(items) if is_list_of_names => Value::List(items.iter().map(strip).collect()),
            other => other.clone(),
        }
    }
}

/// Splits a name into the name without wrapper steps, and these steps.
fn split(name: &str, of_ddp: bool) -> (String, BTreeSet<&'static str>) {
    let (mut kept, mut found) = (Vec::new(), BTreeSet::new());
    let mut steps = name.split('.').peekable();
    while let Some(step) = steps.next() {
        // The last step is a parameter, whatever its name.
        let is_last = steps.peek().is_none();
        let wrapper = WRAPPERS.into_iter().find(|wrapper| *wrapper == step);
        let wrapper = wrapper.or((of_ddp && kept.is_empty() && step == DDP).then_some(DDP));
        match wrapper.filter(|_| !is_last) {
            Some(wrapper) => drop(found.insert(wrapper)),
            None => kept.push(step),
        }
    }
    (kept.join("."), found)
}

impl Checkpoint {
    /// Detects the wrappers from the names of the model, or from those of the optimizer if there is no model.
    pub(crate) fn wrapping(&self) -> Wrappers {
        let of_role = |role| self.tensors.values().filter(move |tensor| tensor.role == role);
        let of_model = of_role(Role::Model)
            .map(|tensor| join(&tensor.path[usize::from(has_model_step(&tensor.path))..]));
        let mut names: Vec<String> = of_model.collect();
        if names.is_empty() {
            let state = |tensor: &Tensor| match OptimizerName::of_path(&tensor.path)? {
                OptimizerName::State { parameter, .. } => Some(parameter),
                _ => None,
            };
            names = of_role(Role::Optimizer).filter_map(state).collect();
        }
        Wrappers::in_names(names.iter().map(String::as_str))
    }

    /// Returns the wrappers found in the names of the model's tensors.
    pub fn wrappers(&self) -> BTreeSet<&'static str> {
        let wrappers = self.wrapping();
        let models = self.tensors.values().filter(|tensor| tensor.role == Role::Model);
        models.flat_map(|tensor| wrappers.strip_path(&tensor.path).1).collect()
    }

    /// Returns a note about wrappers in names, if there are any.
    pub fn wrapper_note(&self) -> Option<String> {
        let found: Vec<String> = self.wrappers().into_iter().map(|step| format!("`{step}.`")).collect();
        (!found.is_empty()).then(|| {
            format!(
                "names contain {}, which module wrappers add; --strip-wrappers removes it",
                found.join(", ")
            )
        })
    }

    /// Removes wrappers from all names.
    ///
    /// # Errors
    /// [`Error::BadRequest`] if two tensors would have the same name.
    pub fn strip_wrappers(mut self) -> Result<Checkpoint, Error> {
        let wrappers = self.wrapping();
        let mut stripped = BTreeMap::new();
        for (old, mut tensor) in std::mem::take(&mut self.tensors) {
            tensor.path = wrappers.strip_any(tensor.role, &tensor.path);
            let name = join(&tensor.path);
            if stripped.insert(name.clone(), tensor).is_some() {
                let reason =
                    format!("without wrappers `{old}` and another tensor would both be named `{name}`");
                return Err(Error::bad_request(&self.path, reason));
            }
        }
        self.tensors = stripped;
        let values = std::mem::take(&mut self.values).into_values();
        self.values = values
            .map(|mut object| {
                object.value = wrappers.strip_value(&object.path, &object.value);
                object.path = wrappers.strip_any(object.role, &object.path);
                (join(&object.path), object)
            })
            .collect();
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Wrappers = Wrappers { of_ddp: true };

    #[test]
    fn wrappers_are_stripped_and_reported() {
        let stripped = |name: &str| {
            let (name, found) = ALL.strip(name);
            (name, found.into_iter().collect::<Vec<_>>().join(" "))
        };
        let of = |name: &str, found: &str| (name.to_owned(), found.to_owned());
        assert_eq!(stripped("_orig_mod.layers.0.w"), of("layers.0.w", "_orig_mod"));
        assert_eq!(stripped("module._orig_mod.layers.0.w"), of("layers.0.w", "_orig_mod module"));
        assert_eq!(
            stripped("layers.0._checkpoint_wrapped_module.w"),
            of("layers.0.w", "_checkpoint_wrapped_module")
        );
        assert_eq!(
            stripped("_fsdp_wrapped_module.layers.0._fsdp_wrapped_module.w"),
            of("layers.0.w", "_fsdp_wrapped_module")
        );
    }

    #[test]
    fn top_level_module_key_is_not_stripped() {
        let path =
            |steps: &[&str]| steps.iter().map(|step| Key::Name((*step).to_owned())).collect::<Vec<_>>();
        let found = BTreeSet::from(["module"]);
        assert_eq!(ALL.strip_path(&path(&["model", "module.w"])), (path(&["model", "w"]), found.clone()));
        assert_eq!(ALL.strip_path(&path(&["module", "module.w"])), (path(&["module", "w"]), found));
        assert_eq!(ALL.strip_path(&path(&["module", "w"])), (path(&["module", "w"]), BTreeSet::new()));
    }

    #[test]
    fn inner_module_and_last_step_are_not_stripped() {
        for name in ["layers.module.w", "module", "w", "a._orig_mod", "my_orig_mod.w"] {
            assert_eq!(ALL.strip(name), (name.to_owned(), BTreeSet::new()));
        }
    }

    #[test]
    fn module_prefix_is_stripped_only_if_all_names_have_it() {
        let some = Wrappers::in_names(["module.w", "head.w"]);
        assert_eq!(some.strip("module.w"), ("module.w".to_owned(), BTreeSet::new()));
        for all in [&["module.w", "module.head.w"][..], &["_orig_mod.module.w"]] {
            let wrappers = Wrappers::in_names(all.iter().copied());
            assert_eq!(wrappers.strip("module.w"), ("w".to_owned(), BTreeSet::from(["module"])));
        }
        assert!(!Wrappers::in_names([]).of_ddp);
    }
}
