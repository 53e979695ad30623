//! Element-wise rules: one pass over parameters, state and gradient, by a kernel that is made of the formula.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use fsdp_core::memory::{Slice, SliceMut};
use fsdp_core::update::{SegmentShard, StepScalars};
use fsdp_core::{Error, Queue};
use fsdp_nn::update::{Calculation, ElementwiseRule, Formula, Groups, Input, STATES_MAX};

use super::runs::{copy, refresh, runs, types};
use crate::device::{CudaBuffer, CudaMemory};
use crate::kernels::{Arg, Source};

/// The kernels that apply a formula.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    /// To elements with state in full precision.
    Elements,
    /// To elements with state of 8 bits.
    Coded,
}

/// The source of the kernels for a formula.
pub(crate) fn source(kind: Kind, formula: &Formula) -> &'static Source {
    static SOURCES: Mutex<BTreeMap<(Kind, Formula), &'static Source>> = Mutex::new(BTreeMap::new());
    let mut sources = SOURCES.lock().unwrap_or_else(PoisonError::into_inner);
    let number = sources.len();
    // They are as many as formulas, and kept for all devices.
    sources.entry((kind, formula.clone())).or_insert_with(|| {
        let (name, text) = match kind {
            Kind::Elements => ("update.cu", include_str!("../../kernels/update.cu")),
            Kind::Coded => ("coded.cu", include_str!("../../kernels/coded.cu")),
        };
        let text = format!("{}#line 1 \"{name}\"\n{text}", definition(formula));
        let name = format!("formula {number} of {name}");
        Box::leak(Box::new(Source { name: name.leak(), text: text.leak() }))
    })
}

/// The formula in C++: the names and types of its numbers, and a function that updates an element.
fn definition(formula: &Formula) -> String {
    let numbers: Vec<String> = (0..formula.factors)
        .map(|index| format!("factor{index}"))
        .chain((0..formula.constants).map(|index| format!("constant{index}")))
        .collect();
    let declared: Vec<String> = numbers.iter().map(|name| format!("T {name}")).collect();
    let mut lines = Vec::new();
    let input = |input| match input {
        Input::Gradient => "gradient".to_owned(),
        Input::Param => "param".to_owned(),
        Input::State(index) => format!("state{index}"),
        Input::Factor(index) => format!("factor{index}"),
        Input::Constant(index) => format!("constant{index}"),
    };
    let (param, state) = formula.results(input, |calculation| {
        let value = match calculation {
            Calculation::Add(a, b) => format!("{a} + {b}"),
            Calculation::Subtract(a, b) => format!("{a} - {b}"),
            Calculation::Multiply(a, b) => format!("{a} * {b}"),
            Calculation::Divide(a, b) => format!("{a} / {b}"),
            Calculation::SquareRoot(a) => format!("square_root({a})"),
            Calculation::IfLess(a, b, then, otherwise) => format!("{a} < {b} ? {then} : {otherwise}"),
        };
        let name = format!("result{}", lines.len());
        lines.push(format!("T {name} = {value};"));
        name
    });
    // A result may be an old value of another variable, so all are read before any is written.
    let variables = param.iter().map(|value| ("param".to_owned(), value));
    let states = state.iter().enumerate().map(|(index, value)| (format!("state{index}"), value));
    let results: Vec<_> = variables.chain(states).collect();
    lines.extend(results.iter().map(|(variable, value)| format!("const T new_{variable} = {value};")));
    lines.extend(results.iter().map(|(variable, _)| format!("{variable} = new_{variable};")));
    let states: Vec<String> = (0..STATES_MAX).map(|index| format!("T& state{index}")).collect();
    format!(
        "#define NUMBERS {}\n#define ALL_NUMBERS {}\nconstexpr int STATES = {};\nconstexpr bool CHANGES_PARAMS = {};\n\
         __device__ inline void update(T gradient, T& param, {}, NUMBERS) {{\n{}\n}}\n",
        declared.join(", "),
        numbers.join(", "),
        state.len(),
        param.is_some(),
        states.join(", "),
        lines.join("\n")
    )
}

/// The last parameters of a kernel: factors and constants of the formula.
pub(super) fn numbers<'a>(factors: &[f64], constants: &[f64]) -> Vec<Arg<'a>> {
    factors.iter().chain(constants).map(|number| Arg::Real(*number)).collect()
}

/// Updates parameters and state of a shard.
pub(super) fn update(
    memory: &CudaMemory,
    rule: &dyn ElementwiseRule,
    shard: &mut SegmentShard<'_, CudaBuffer>,
    scalars: &StepScalars<'_, CudaBuffer>,
) -> Result<(), Error> {
    let (formula, constants) = rule.formula();
    let kernels = memory.kernels(Queue::Compute, source(Kind::Elements, &formula), types(shard)?);
    let largest_param = Arg::Real(shard.largest_param());
    for run in runs(shard.pieces, rule.groups().unwrap_or(&Groups::uniform(0.0))) {
        let mut args = vec![memory.input(Slice::new(shard.gradient, run.offset, run.len))?];
        args.push(memory.output(SliceMut::new(shard.params, run.offset, run.len))?);
        for buffer in shard.state.iter_mut() {
            args.push(memory.output(SliceMut::new(buffer, run.offset, run.len))?);
        }
        args.resize(2 + STATES_MAX, Arg::Null);
        // What does not change has its copy already.
        let low = shard.low.as_deref_mut().filter(|_| formula.param.is_some());
        args.push(copy(memory, low, run.offset, run.len)?);
        args.extend([Arg::Len(run.len), memory.input(scalars.factors)?]);
        args.extend([memory.output(SliceMut::whole(shard.not_finite))?, largest_param]);
        args.extend(numbers(&rule.factors_of(run.param, scalars.step, scalars.lr), &constants));
        kernels.elements("update_elements", run.len, &args)?;
    }
    if formula.param.is_some() { refresh(memory, shard) } else { Ok(()) }
}
