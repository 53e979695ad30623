//! The program of a schedule that was traced.

use std::sync::Arc;

use super::{Argument, Trace};
use crate::buffer::{Content, Storage};
use crate::hlo::{Collective, Name, Value, list};

/// A program with everything that it takes to run it on one rank.
pub(crate) struct Traced {
    /// The StableHLO text, the same on all ranks.
    pub(crate) text: String,
    /// How many operations it has.
    pub(crate) operations: usize,
    /// Its collectives, in order.
    pub(crate) collectives: Vec<Collective>,
    /// The arguments, in order.
    pub(crate) arguments: Vec<Argument>,
    /// Where the results go, in order.
    pub(crate) results: Vec<Arc<Storage>>,
    /// Storage of arguments that the program does not change, with the numbers of these.
    pub(crate) unchanged: Vec<(usize, Arc<Storage>)>,
}

impl Trace {
    /// The program of what was traced, for so many replicas.
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
        let text = self.module(replicas, &aliases, &values);
        let (operations, arguments) = (self.hlo.operations(), self.arguments);
        let collectives = self.hlo.into_collectives();
        Traced { text, operations, collectives, arguments, results, unchanged }
    }

    fn module(&self, replicas: usize, aliases: &[Option<usize>], results: &[Value]) -> String {
        let arguments = self.arguments.iter().zip(aliases).enumerate().map(|(number, (argument, alias))| {
            let alias =
                alias.map_or_else(String::new, |result| format!(" {{tf.aliasing_output = {result} : i32}}"));
            format!("{}: {}{alias}", Name::Argument(number), argument.shape)
        });
        let shapes = list(results.iter().map(|value| &value.shape));
        let returned = match results {
            [] => String::new(),
            _ => format!(" {} : {shapes}", list(results.iter().map(|value| value.name))),
        };
        format!(
            "module @step attributes {{mhlo.num_partitions = 1 : i32, mhlo.num_replicas = {replicas} : i32}} {{\n  \
             func.func public @main({}) -> ({shapes}) {{\n{}    return{returned}\n  }}\n}}\n",
            list(arguments),
            self.hlo.body()
        )
    }
}
