//! The finished program of a traced schedule.

use std::sync::Arc;

use super::{Argument, Trace};
use crate::buffer::{Content, Storage};
use crate::hlo::{Builder, Collective, Name, Shape, Value, list};

/// A program to compile, the same on all ranks.
#[derive(Clone)]
pub(crate) struct Module {
    hlo: Builder,
    /// Shapes of the arguments.
    arguments: Vec<Shape>,
    results: Vec<Value>,
    /// For each argument, the index of the result that reuses its storage.
    aliases: Vec<Option<usize>>,
    replicas: usize,
}

/// A program, and what is needed to run it on one rank.
pub(crate) struct Traced {
    pub(crate) module: Module,
    /// The arguments, in order.
    pub(crate) arguments: Vec<Argument>,
    /// The storage that receives the results, in order.
    pub(crate) results: Vec<Arc<Storage>>,
    /// Storage of arguments that the program does not change, with the argument indices.
    pub(crate) unchanged: Vec<(usize, Arc<Storage>)>,
}

impl Trace {
    /// Finishes the trace into a program of `replicas` replicas.
    pub(crate) fn finish(mut self, replicas: usize) -> Traced {
        let (mut results, mut values, mut unchanged) = (Vec::new(), Vec::new(), Vec::new());
        let mut aliases = vec![None; self.arguments.len()];
        for storage in std::mem::take(&mut self.touched) {
            let Some(storage) = storage.upgrade() else { continue };
            let held = match storage.take() {
                Content::Traced(held) if !held.is_empty() => held,
                _ => continue,
            };
            let is_own = |argument: &Argument| {
                argument.storage.as_ref().is_some_and(|own| own.as_ptr() == Arc::as_ptr(&storage))
            };
            let argument = self.arguments.iter().position(is_own);
            let value = self.whole(&storage, &held);
            match argument {
                Some(number) if value.name == Name::Argument(number) => unchanged.push((number, storage)),
                _ => {
                    if let Some(number) = argument {
                        aliases[number] = Some(results.len());
                    }
                    values.push(value);
                    results.push(storage);
                }
            }
        }
        let shapes = self.arguments.iter().map(|argument| argument.shape.clone()).collect();
        let module = Module { hlo: self.hlo, arguments: shapes, results: values, aliases, replicas };
        Traced { module, arguments: self.arguments, results, unchanged }
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

    /// The same program with its layers in loops (see [`Builder::scan`]); `None` if there are no such loops.
    pub(crate) fn scanned(&self) -> Option<Self> {
        let mut own = self.clone();
        (own.hlo.scan(&own.arguments, &mut own.results) > 0).then_some(own)
    }

    /// The StableHLO text.
    pub(crate) fn text(&self) -> String {
        let arguments =
            self.arguments.iter().zip(&self.aliases).enumerate().map(|(number, (shape, alias))| {
                let alias = alias
                    .map_or_else(String::new, |result| format!(" {{tf.aliasing_output = {result} : i32}}"));
                format!("{}: {shape}{alias}", Name::Argument(number))
            });
        let shapes = list(self.results.iter().map(|value| &value.shape));
        let returned = match &self.results[..] {
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
