//! The finished program of a traced schedule.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use super::{Argument, Trace};
use crate::buffer::{Content, DeviceStack, Source, Storage};
use crate::hlo::{
    ArgumentStack, Builder, Collective, Name, OutputKind, Shape, Signature, Stacked, Value, list,
};

/// A program to compile, the same on all ranks.
#[derive(Clone)]
pub(crate) struct Module {
    hlo: Builder,
    signature: Signature,
    stacked: Stacked,
    replicas: usize,
}

/// What a program takes and returns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Interface {
    pub(crate) inputs: Vec<Input>,
    pub(crate) outputs: Vec<Output>,
}

/// An input of a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Input {
    pub(crate) shape: Shape,
    /// The traced arguments in it: one, or those of a stack.
    pub(crate) members: Vec<usize>,
}

/// An output of a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Output {
    pub(crate) shape: Shape,
    /// What it holds; for a stack of arguments, the index of the input.
    pub(crate) kind: OutputKind,
}

/// A program, and what is needed to run it on one rank.
pub(crate) struct Traced {
    pub(crate) module: Module,
    /// The arguments, in order.
    pub(crate) arguments: Vec<Argument>,
    /// The storage of each argument that still has a handle and contents at the end.
    pub(crate) storages: Vec<Option<Arc<Storage>>>,
    /// The storage that receives the results, in order.
    pub(crate) results: Vec<Arc<Storage>>,
}

impl Trace {
    /// Finishes the trace into a program of `replicas` replicas.
    pub(crate) fn finish(mut self, replicas: usize) -> Traced {
        let (mut results, mut values) = (Vec::new(), Vec::new());
        let mut aliases = vec![None; self.arguments.len()];
        let mut storages = vec![None; self.arguments.len()];
        for storage in std::mem::take(&mut self.touched) {
            let Some(storage) = storage.upgrade() else { continue };
            let contents = match storage.take() {
                Content::Traced(contents) if !contents.is_empty() => contents,
                _ => continue,
            };
            let is_own = |argument: &Argument| {
                argument.storage.as_ref().is_some_and(|own| own.as_ptr() == Arc::as_ptr(&storage))
            };
            let argument = self.arguments.iter().position(is_own);
            let value = self.assemble(&storage, &contents);
            if let Some(number) = argument {
                storages[number] = Some(Arc::clone(&storage));
                if value.name == Name::Argument(number) {
                    continue;
                }
                aliases[number] = Some(results.len());
            }
            values.push(value);
            results.push(storage);
        }
        let shapes = self.arguments.iter().map(|argument| argument.shape.clone()).collect();
        let signature = Signature { arguments: shapes, results: values, aliases };
        let module = Module { hlo: self.hlo, signature, stacked: Stacked::default(), replicas };
        Traced { module, arguments: self.arguments, storages, results }
    }
}

impl Traced {
    /// The arguments that are stored together, as all elements of a stack.
    pub(crate) fn together(&self) -> Vec<Vec<usize>> {
        let mut stacks: BTreeMap<*const DeviceStack, Vec<Option<usize>>> = BTreeMap::new();
        for (number, argument) in self.arguments.iter().enumerate() {
            if let Source::Element(stack, place) = &argument.source {
                stacks.entry(Arc::as_ptr(stack)).or_insert_with(|| vec![None; stack.count])[*place] =
                    Some(number);
            }
        }
        let mut complete: Vec<Vec<usize>> =
            stacks.into_values().filter_map(|members| members.into_iter().collect()).collect();
        // Pointers differ between ranks.
        complete.sort_unstable();
        complete
    }
}

impl Module {
    /// Number of operations.
    pub(crate) fn operations(&self) -> usize {
        self.hlo.operations()
    }

    /// The collectives, in order.
    pub(crate) fn collectives(&self) -> Vec<Collective> {
        self.hlo.collectives()
    }

    /// The same program with its layers in loops (see [`Builder::scan`]); `None` if there are no such loops. Arguments
    /// that are stored `together` are passed together if their layers are in loops. `in_parallel` says whether the device
    /// may run operations beside a loop.
    pub(crate) fn scanned(&self, together: &[Vec<usize>], in_parallel: bool) -> Option<Self> {
        let mut module = self.clone();
        let (loops, stacked) = module.hlo.scan(&mut module.signature, together, in_parallel);
        module.stacked = stacked;
        (loops > 0).then_some(module)
    }

    /// Inputs with their values: the arguments that are in no stack, then the stacks.
    fn inputs(&self) -> Vec<(Name, Input)> {
        let stacks = &self.stacked.arguments;
        let in_stacks: HashSet<usize> = stacks.iter().flat_map(|stack| stack.members.clone()).collect();
        let arguments = self.signature.arguments.iter().enumerate();
        let single = arguments.filter(|(number, _)| !in_stacks.contains(number)).map(|(number, shape)| {
            (Name::Argument(number), Input { shape: shape.clone(), members: vec![number] })
        });
        let stack = |ArgumentStack { members, value, .. }: &ArgumentStack| {
            (value.name, Input { shape: value.shape.clone(), members: members.clone() })
        };
        single.chain(stacks.iter().map(stack)).collect()
    }

    /// What the program takes and returns.
    pub(crate) fn interface(&self) -> Interface {
        let inputs: Vec<Input> = self.inputs().into_iter().map(|(_, input)| input).collect();
        let single = inputs.len() - self.stacked.arguments.len();
        let output = |(value, kind): (&Value, OutputKind)| {
            let kind = match kind {
                OutputKind::Arguments(stack) => OutputKind::Arguments(single + stack),
                results => results,
            };
            Output { shape: value.shape.clone(), kind }
        };
        let outputs = self.signature.outputs(&self.stacked).into_iter().map(output).collect();
        Interface { inputs, outputs }
    }

    /// The StableHLO text.
    pub(crate) fn text(&self) -> String {
        let (results, kinds): (Vec<&Value>, Vec<OutputKind>) =
            self.signature.outputs(&self.stacked).into_iter().unzip();
        let aliases = &self.signature.aliases;
        let aliased = |name: Name| match name {
            Name::Argument(number) if number >= aliases.len() => {
                Some(OutputKind::Arguments(number - aliases.len()))
            }
            Name::Argument(number) => aliases[number].map(|result| OutputKind::Results(vec![result])),
            _ => unreachable!("{name} is an argument"),
        };
        let arguments = self.inputs().into_iter().map(|(name, Input { shape, .. })| {
            let output = aliased(name).and_then(|aliased| kinds.iter().position(|kind| *kind == aliased));
            let alias =
                output.map_or_else(String::new, |output| format!(" {{tf.aliasing_output = {output} : i32}}"));
            format!("{name}: {shape}{alias}")
        });
        let shapes = list(results.iter().map(|value| &value.shape));
        let returned = match &results[..] {
            [] => String::new(),
            results => format!(" {} : {shapes}", list(results.iter().map(|value| value.name))),
        };
        format!(
            "module @step attributes {{mhlo.num_partitions = 1 : i32, mhlo.num_replicas = {} : i32}} {{\n  \
             func.func public @main({}) -> ({shapes}) {{\n{}    return{returned}\n  }}\n}}\n",
            self.replicas,
            list(arguments),
            self.hlo.body()
        )
    }
}

#[cfg(test)]
mod tests;
