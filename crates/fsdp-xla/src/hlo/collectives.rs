//! Collectives between the replicas of a program.

use std::fmt;

use super::{Builder, Shape, Value, list};

/// A collective of a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Collective {
    /// One of [`Collective::KINDS`].
    pub kind: &'static str,
    /// Number of elements of its result.
    pub elements: usize,
    /// Its purpose and its index among the collectives of the step, in the order of the schedule: `forward/unit
    /// 3/all-gather 12`. XLA preserves it as the name of the compiled operation. Empty for a collective that the
    /// compiler added.
    pub name: String,
}

impl Collective {
    /// The kinds of collectives, by XLA's names.
    pub const KINDS: [&'static str; 5] =
        ["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute"];

    /// Its purpose, parsed from its name: `forward/unit 3`. All segments of a unit have the same one.
    pub fn of(&self) -> &str {
        self.name.rsplit_once('/').map_or("", |(of, _)| of)
    }
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = if self.name.is_empty() { self.kind } else { &self.name };
        write!(f, "{name} ({} elements)", self.elements)
    }
}

/// Communication groups; each rank of the world is in exactly one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Groups(Vec<Vec<usize>>);

impl Groups {
    /// # Panics
    /// If groups differ in size.
    pub(crate) fn new(groups: Vec<Vec<usize>>) -> Self {
        assert!(
            groups.iter().all(|group| group.len() == groups[0].len()),
            "groups are of one size: {groups:?}"
        );
        Self(groups)
    }

    /// Ranks per group.
    pub(crate) fn size(&self) -> usize {
        self.0[0].len()
    }
}

impl fmt::Display for Groups {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows = list(self.0.iter().map(|group| format!("[{}]", list(group))));
        write!(f, "replica_groups = dense<[{rows}]> : tensor<{}x{}xi64>", self.0.len(), self.size())
    }
}

/// The region that sums two numbers.
fn sum(x: &Value) -> String {
    let number = Shape::new(&[], x.element());
    format!(
        "({{\n    ^bb0(%a: {number}, %b: {number}):\n      %s = stablehlo.add %a, %b : {number}\n      \
         stablehlo.return %s : {number}\n    }})"
    )
}

impl Builder {
    /// Concatenates the values of all ranks of the group. Here and below, `purpose` is the purpose of the collective.
    pub(crate) fn all_gather(&mut self, x: &Value, groups: &Groups, purpose: &str) -> Value {
        let mut shape = x.shape.clone();
        shape.dims[0] *= groups.size();
        let text = format_args!(
            "\"stablehlo.all_gather\"({}) <{{all_gather_dim = 0 : i64, {groups}}}> : ({}) -> {shape}",
            x.name, x.shape
        );
        self.collective(("all-gather", purpose), shape.clone(), text)
    }

    /// This rank's part of the sum over the group, in an order of the plugin's choice.
    pub(crate) fn reduce_scatter(&mut self, x: &Value, groups: &Groups, purpose: &str) -> Value {
        let mut shape = x.shape.clone();
        assert!(shape.dims[0].is_multiple_of(groups.size()), "{shape} among {}", groups.size());
        shape.dims[0] /= groups.size();
        let text = format_args!(
            "\"stablehlo.reduce_scatter\"({}) <{{scatter_dimension = 0 : i64, {groups}}}> {} : ({}) -> {shape}",
            x.name,
            sum(x),
            x.shape
        );
        self.collective(("reduce-scatter", purpose), shape.clone(), text)
    }

    /// The sum over the group, in an order of the plugin's choice.
    pub(crate) fn all_reduce(&mut self, x: &Value, groups: &Groups, purpose: &str) -> Value {
        let text = format_args!(
            "\"stablehlo.all_reduce\"({}) <{{{groups}}}> {} : ({}) -> {}",
            x.name,
            sum(x),
            x.shape,
            x.shape
        );
        self.collective(("all-reduce", purpose), x.shape.clone(), text)
    }

    /// Sends part `i` to rank `i` of the group; part `i` of the result comes from that rank.
    pub(crate) fn all_to_all(&mut self, x: &Value, groups: &Groups, purpose: &str) -> Value {
        assert!(x.dims()[0].is_multiple_of(groups.size()), "{} among {}", x.shape, groups.size());
        let text = format_args!(
            "\"stablehlo.all_to_all\"({}) <{{split_dimension = 0 : i64, concat_dimension = 0 : i64, split_count = {} : i64, \
             {groups}}}> : ({}) -> {}",
            x.name,
            groups.size(),
            x.shape,
            x.shape
        );
        self.collective(("all-to-all", purpose), x.shape.clone(), text)
    }

    /// Adds a collective and records it.
    fn collective(
        &mut self,
        (kind, purpose): (&'static str, &str),
        shape: Shape,
        text: fmt::Arguments<'_>,
    ) -> Value {
        let name = format!("{purpose}/{kind} {}", self.collectives);
        self.collectives += 1;
        let collective = Collective { kind, elements: shape.len(), name };
        self.push_all(vec![shape], vec![collective], text.to_string()).swap_remove(0)
    }

    /// The sum of a matrix's rows, by the reduction tree for that many.
    pub(crate) fn tree_sum(&mut self, x: &Value) -> Value {
        let [rows, width] = x.dims()[..] else {
            panic!("the rows of a matrix are added, not of {}", x.shape)
        };
        let row = |builder: &mut Builder, index: usize| {
            let row = builder.slice(x, &[index..index + 1, 0..width]);
            builder.reshape(&row, &[width])
        };
        let rows = (0..rows).map(|index| row(self, index)).collect();
        self.tree_sum_of(rows)
    }

    fn tree_sum_of(&mut self, mut parts: Vec<Value>) -> Value {
        let left = parts.len().next_power_of_two() / 2;
        if left == 0 || parts.len() == 1 {
            return parts.pop().expect("something is added");
        }
        let right = parts.split_off(left);
        let (a, b) = (self.tree_sum_of(parts), self.tree_sum_of(right));
        self.add(&a, &b)
    }
}
