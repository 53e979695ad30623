//! The operations and collectives that the compiler left of a program, read from XLA's own format.
//!
//! The format is an `HloModuleProto` (xla/service/hlo.proto), of which only a few fields are read.

use std::collections::BTreeMap;

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
        let is_product =
            |instruction: &&Instruction| matches!(instruction.opcode.as_str(), "dot" | "convolution");
        let (operations, products) = (all().count(), all().filter(is_product).count());
        let mut optimized = Self { operations, products, ..Self::default() };
        optimized.walk(&module, module.entry, false);
        Some(optimized)
    }

    /// Records the collectives of a computation and of those that it calls.
    fn walk(&mut self, module: &Module, computation: i64, is_asynchronous: bool) {
        let Some(found) = module.computations.iter().find(|candidate| candidate.id == computation) else {
            return;
        };
        let sequences = module.schedule.as_ref().map(|schedule| &schedule.sequences);
        let in_order: Vec<&Instruction> = match sequences.and_then(|all| all.get(&computation)) {
            Some(sequence) => {
                let by_id: BTreeMap<i64, &Instruction> =
                    found.instructions.iter().map(|instruction| (instruction.id, instruction)).collect();
                sequence.instructions.iter().filter_map(|id| by_id.get(id).copied()).collect()
            }
            None => found.instructions.iter().collect(),
        };
        for instruction in in_order {
            let start = instruction.opcode.strip_suffix("-start");
            let opcode = start.unwrap_or(&instruction.opcode);
            if let Some(kind) = Collective::KINDS.into_iter().find(|kind| *kind == opcode) {
                self.asynchronous += usize::from(start.is_some() || is_asynchronous);
                let name = instruction.origin.as_ref().map_or_else(String::new, |origin| origin.name.clone());
                self.collectives.push(Collective { kind, elements: elements(instruction), name });
                continue;
            }
            for &called in &instruction.called {
                self.walk(module, called, is_asynchronous || start.is_some());
            }
        }
    }
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
        Instruction { opcode: opcode.to_owned(), shape, origin, id, called: called.to_vec() }
    }

    #[test]
    fn collectives_are_read_in_schedule_order() {
        let inner = Computation { id: 3, instructions: vec![instruction(30, "reduce-scatter", &[4], &[])] };
        let wrapped = Computation { id: 1, instructions: vec![instruction(10, "call", &[4], &[3])] };
        let tuple =
            vec![Shape { dims: vec![8], parts: Vec::new() }, Shape { dims: vec![16], parts: Vec::new() }];
        let mut gather = instruction(22, "all-gather-start", &[], &[]);
        gather.shape = Some(Shape { dims: Vec::new(), parts: tuple });
        let main = Computation {
            id: 2,
            instructions: vec![
                instruction(20, "all-reduce", &[3, 5], &[]),
                instruction(21, "async-start", &[4], &[1]),
                gather,
                instruction(23, "all-gather-done", &[16], &[]),
                instruction(24, "dot", &[2, 2], &[]),
            ],
        };
        let sequence = Sequence { instructions: vec![22, 23, 21, 24, 20] };
        let schedule = Some(Schedule { sequences: BTreeMap::from([(2, sequence)]) });
        let module = Module { computations: vec![inner, wrapped, main], entry: 2, schedule };
        let found = Optimized::read("hlo", &module.encode_to_vec()).unwrap();
        let collective = |kind, elements, id| Collective { kind, elements, name: format!("made of {id}") };
        let expected = vec![
            collective("all-gather", 16, 22),
            collective("reduce-scatter", 4, 30),
            collective("all-reduce", 15, 20),
        ];
        assert_eq!(found, Optimized { operations: 7, products: 1, collectives: expected, asynchronous: 2 });
        let config = WithConfig { module: Some(module) };
        assert_eq!(Optimized::read("hlo_with_config", &config.encode_to_vec()), Some(found));
        assert_eq!(Optimized::read("mlir", b""), None);
    }
}
