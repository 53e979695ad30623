//! The operations and collectives that the compiler left of a program, read from XLA's own format.
//!
//! The format is an `HloModuleProto` (xla/service/hlo.proto), of which only a few fields are read.

use std::collections::{BTreeMap, BTreeSet};

use prost::Message;

use crate::hlo::Collective;

#[derive(PartialEq, Message)]
struct WithConfig {
    #[prost(message, optional, tag = "1")]
    module: Option<Module>,
}

#[derive(PartialEq, Message)]
struct Module {
    #[prost(message, repeated, tag = "3")]
    computations: Vec<Computation>,
    #[prost(int64, tag = "6")]
    entry: i64,
    #[prost(message, optional, tag = "7")]
    schedule: Option<Schedule>,
}

#[derive(PartialEq, Message)]
struct Computation {
    #[prost(message, repeated, tag = "2")]
    instructions: Vec<Instruction>,
    #[prost(int64, tag = "5")]
    id: i64,
}

#[derive(PartialEq, Message)]
struct Instruction {
    #[prost(string, tag = "2")]
    opcode: String,
    #[prost(message, optional, tag = "3")]
    shape: Option<Shape>,
    #[prost(message, optional, tag = "7")]
    origin: Option<Origin>,
    #[prost(int64, tag = "35")]
    id: i64,
    #[prost(int64, repeated, tag = "36")]
    operands: Vec<i64>,
    #[prost(int64, repeated, tag = "38")]
    called: Vec<i64>,
}

/// The origin of an instruction (`OpMetadata`).
#[derive(PartialEq, Message)]
struct Origin {
    #[prost(string, tag = "2")]
    name: String,
}

#[derive(PartialEq, Message)]
struct Shape {
    #[prost(int64, repeated, tag = "3")]
    dims: Vec<i64>,
    #[prost(message, repeated, tag = "4")]
    parts: Vec<Shape>,
}

#[derive(PartialEq, Message)]
struct Schedule {
    #[prost(btree_map = "int64, message", tag = "1")]
    sequences: BTreeMap<i64, Sequence>,
}

#[derive(PartialEq, Message)]
struct Sequence {
    #[prost(int64, repeated, tag = "1")]
    instructions: Vec<i64>,
}

/// Statistics of an optimized program.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Optimized {
    /// Number of operations in all computations, including those within fusions.
    pub operations: usize,
    /// Number of matrix products among the operations; compilers may turn them into convolutions.
    pub products: usize,
    /// The collectives, in the order of the compiler's schedule, if it has one.
    pub collectives: Vec<Collective>,
    /// Number of asynchronous collectives: started at one place and awaited at another.
    pub asynchronous: usize,
    /// Number of asynchronous collectives with a matrix product between start and end, in the compiler's schedule.
    pub overlapped: usize,
}

impl Instruction {
    fn is_product(&self) -> bool {
        matches!(self.opcode.as_str(), "dot" | "convolution")
    }
}

impl Module {
    fn computation(&self, id: i64) -> Option<&Computation> {
        self.computations.iter().find(|candidate| candidate.id == id)
    }

    /// The instructions of a computation, in the order of the compiler's schedule, if it has one.
    fn sequence<'a>(&self, computation: &'a Computation) -> Vec<&'a Instruction> {
        let sequences = self.schedule.as_ref().map(|schedule| &schedule.sequences);
        let Some(sequence) = sequences.and_then(|all| all.get(&computation.id)) else {
            return computation.instructions.iter().collect();
        };
        let by_id: BTreeMap<i64, &Instruction> =
            computation.instructions.iter().map(|instruction| (instruction.id, instruction)).collect();
        sequence.instructions.iter().filter_map(|id| by_id.get(id).copied()).collect()
    }

    /// The computations with a product in them, or in those that they call.
    fn with_products(&self) -> BTreeSet<i64> {
        let mut found = BTreeSet::new();
        loop {
            let has_product = |computation: &&Computation| {
                let mut all = computation.instructions.iter();
                all.any(|one| one.is_product() || one.called.iter().any(|called| found.contains(called)))
            };
            let next: BTreeSet<i64> =
                self.computations.iter().filter(has_product).map(|computation| computation.id).collect();
            if next.len() == found.len() {
                return found;
            }
            found = next;
        }
    }
}

impl Optimized {
    /// Reads a program in the given format; `None` if the format is unknown.
    pub(crate) fn read(format: &str, bytes: &[u8]) -> Option<Self> {
        let module = match format {
            "hlo" => Module::decode(bytes).ok()?,
            "hlo_with_config" => WithConfig::decode(bytes).ok()?.module?,
            _ => return None,
        };
        let all = || module.computations.iter().flat_map(|computation| &computation.instructions);
        let (operations, products) = (all().count(), all().filter(|one| one.is_product()).count());
        let mut optimized = Self { operations, products, ..Self::default() };
        optimized.walk(&module, module.entry, None, &module.with_products());
        Some(optimized)
    }

    /// Records the collectives of a computation and of those that it calls. `started` says, if the computation is called
    /// asynchronously, whether there is a product before its end. `with_products` are the computations with products.
    fn walk(
        &mut self,
        module: &Module,
        computation: i64,
        started: Option<bool>,
        with_products: &BTreeSet<i64>,
    ) {
        let Some(found) = module.computation(computation) else { return };
        let sequence = module.sequence(found);
        for (place, instruction) in sequence.iter().enumerate() {
            let start = instruction.opcode.strip_suffix("-start");
            let opcode = start.unwrap_or(&instruction.opcode);
            let started = if start.is_some() {
                Some(has_product_until_end(&sequence[place..], with_products))
            } else {
                started
            };
            if let Some(kind) = Collective::KINDS.into_iter().find(|kind| *kind == opcode) {
                self.asynchronous += usize::from(started.is_some());
                self.overlapped += usize::from(started == Some(true));
                let name = instruction.origin.as_ref().map_or_else(String::new, |origin| origin.name.clone());
                self.collectives.push(Collective { kind, elements: elements(instruction), name });
                continue;
            }
            for &called in &instruction.called {
                self.walk(module, called, started, with_products);
            }
        }
    }
}

/// Whether there is a product between the first instruction, which starts a collective, and the one that ends it.
fn has_product_until_end(sequence: &[&Instruction], with_products: &BTreeSet<i64>) -> bool {
    // The end may wait for the start through updates.
    let mut pending = BTreeSet::from([sequence[0].id]);
    for instruction in &sequence[1..] {
        if instruction.operands.iter().any(|operand| pending.contains(operand)) {
            if instruction.opcode.ends_with("-done") {
                return false;
            }
            pending.insert(instruction.id);
        }
        let has_product = instruction.called.iter().any(|called| with_products.contains(called));
        if instruction.is_product() || has_product {
            return true;
        }
    }
    false
}

/// Number of elements that a collective produces.
fn elements(instruction: &Instruction) -> usize {
    let Some(shape) = &instruction.shape else { return 0 };
    // The start of an all-gather has its operands beside its results.
    match (instruction.opcode.as_str(), &shape.parts[..]) {
        ("all-gather-start", [_, results]) => elements_of(results),
        _ => elements_of(shape),
    }
}

fn elements_of(shape: &Shape) -> usize {
    if shape.parts.is_empty() {
        return shape.dims.iter().map(|&dim| usize::try_from(dim).unwrap_or(0)).product();
    }
    shape.parts.iter().map(elements_of).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn instruction(id: i64, opcode: &str, dims: &[i64], called: &[i64]) -> Instruction {
        let shape = Some(Shape { dims: dims.to_vec(), parts: Vec::new() });
        let origin = Some(Origin { name: format!("made of {id}") });
        let (opcode, operands, called) = (opcode.to_owned(), Vec::new(), called.to_vec());
        Instruction { opcode, shape, origin, id, operands, called }
    }

    #[test]
    fn collectives_are_read_in_schedule_order() {
        let inner = Computation { id: 3, instructions: vec![instruction(30, "reduce-scatter", &[4], &[])] };
        let wrapped = Computation { id: 1, instructions: vec![instruction(10, "call", &[4], &[3])] };
        let tuple =
            vec![Shape { dims: vec![8], parts: Vec::new() }, Shape { dims: vec![16], parts: Vec::new() }];
        let mut gather = instruction(22, "all-gather-start", &[], &[]);
        gather.shape = Some(Shape { dims: Vec::new(), parts: tuple });
        let after = |start: i64, end: Instruction| Instruction { operands: vec![start], ..end };
        let main = Computation {
            id: 2,
            instructions: vec![
                instruction(20, "all-reduce", &[3, 5], &[]),
                instruction(21, "async-start", &[4], &[1]),
                gather,
                after(22, instruction(23, "all-gather-done", &[16], &[])),
                instruction(24, "fusion", &[2, 2], &[4]),
                after(21, instruction(25, "async-done", &[4], &[])),
            ],
        };
        let fused = Computation { id: 4, instructions: vec![instruction(40, "dot", &[2, 2], &[])] };
        let sequence = Sequence { instructions: vec![22, 23, 21, 24, 25, 20] };
        let schedule = Some(Schedule { sequences: BTreeMap::from([(2, sequence)]) });
        let module = Module { computations: vec![inner, wrapped, fused, main], entry: 2, schedule };
        let found = Optimized::read("hlo", &module.encode_to_vec()).unwrap();
        let collective = |kind, elements, id| Collective { kind, elements, name: format!("made of {id}") };
        let expected = vec![
            collective("all-gather", 16, 22),
            collective("reduce-scatter", 4, 30),
            collective("all-reduce", 15, 20),
        ];
        // Only the reduction has the product between its start and its end.
        let (asynchronous, overlapped) = (2, 1);
        assert_eq!(
            found,
            Optimized { operations: 9, products: 1, collectives: expected, asynchronous, overlapped }
        );
        let config = WithConfig { module: Some(module) };
        assert_eq!(Optimized::read("hlo_with_config", &config.encode_to_vec()), Some(found));
        assert_eq!(Optimized::read("mlir", b""), None);
    }
}
