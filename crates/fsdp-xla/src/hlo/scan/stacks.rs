//! The stacks of a program: which values are in them, and which of them are arguments.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::signature::Signature;
use super::stack::Stack;
use crate::hlo::operation::Operation;
use crate::hlo::{Builder, Name, Shape, Value};

/// Elements of a stack at equal distances, one per round.
#[derive(Clone, Debug)]
pub(super) struct Elements {
    pub(super) stack: Stack,
    /// The element of round 0, and the distance to that of the next round.
    pub(super) first: usize,
    pub(super) step: isize,
}

impl Elements {
    /// The index of the element of a round.
    pub(super) fn index(&self, round: usize) -> usize {
        self.first
            .checked_add_signed(self.step * round as isize)
            .expect("rounds access elements of the stack")
    }
}

/// Arguments that are passed as one stack.
#[derive(Debug)]
pub(super) struct StackedArgument {
    pub(super) members: Vec<usize>,
    pub(super) stack: Stack,
    /// The loop that updates elements in place, if there is one.
    pub(super) updated: Option<Updated>,
}

/// A stacked argument after the loop that updates it.
#[derive(Debug)]
pub(super) struct Updated {
    pub(super) stack: Stack,
    /// The elements that the loop replaces.
    pub(super) places: HashSet<usize>,
}

/// The stacks of a program.
pub(super) struct Stacks<'a> {
    /// Shapes of all arguments: the traced ones, then the stacks.
    pub(super) shapes: Vec<Shape>,
    pub(super) arguments: Vec<StackedArgument>,
    /// Number of traced arguments.
    traced: usize,
    /// Arguments that are already stored together.
    together: &'a [Vec<usize>],
    /// For each result that reuses the storage of an argument: that argument.
    owners: HashMap<Name, usize>,
    /// The stacks that hold a value, and its index in each.
    places: HashMap<Name, Vec<(Stack, usize)>>,
}

impl<'a> Stacks<'a> {
    pub(super) fn new(signature: &Signature, together: &'a [Vec<usize>]) -> Self {
        let owner = |(argument, result): (usize, &Option<usize>)| {
            result.map(|result| (signature.results[result].name, argument))
        };
        Self {
            shapes: signature.arguments.clone(),
            arguments: Vec::new(),
            traced: signature.arguments.len(),
            together,
            owners: signature.aliases.iter().enumerate().filter_map(owner).collect(),
            places: HashMap::new(),
        }
    }

    /// Records that a value is an element of a stack.
    pub(super) fn record(&mut self, name: Name, stack: &Stack, number: usize) {
        self.places.entry(name).or_default().push((stack.clone(), number));
    }

    /// Records that a stack has another name.
    pub(super) fn rename(&mut self, from: Name, to: Name) {
        for (stack, _) in self.places.values_mut().flatten() {
            if stack.value.name == from {
                stack.value.name = to;
            }
        }
    }

    /// Finds a stack that holds all of these values at equal distances, and that is an argument or a result of one of
    /// the `before` operations.
    pub(super) fn find(&self, values: &[Value], before: &[Operation]) -> Option<Elements> {
        let is_there = |stack: &Stack| match stack.value.name.number() {
            Some(number) => before.iter().any(|one| one.number() == number),
            None => true,
        };
        self.places.get(&values[0].name)?.iter().find_map(|(stack, _)| {
            let index = |value: &Value| self.index(value.name, stack);
            let numbers: Vec<usize> = values.iter().map(index).collect::<Option<_>>()?;
            let (first, step) = progression(&numbers)?;
            is_there(stack).then(|| Elements { stack: stack.clone(), first, step })
        })
    }

    /// The stacks that hold a value.
    pub(super) fn of(&self, name: Name) -> impl Iterator<Item = &Stack> {
        self.places.get(&name).into_iter().flatten().map(|(stack, _)| stack)
    }

    /// The index of a value in a stack.
    pub(super) fn index(&self, name: Name, stack: &Stack) -> Option<usize> {
        let is_same = |(other, _): &&(Stack, usize)| other.value.name == stack.value.name;
        self.places.get(&name)?.iter().find(is_same).map(|(_, number)| *number)
    }

    /// Makes these values, if they are arguments that are not in a stack yet, a stack. Arguments that are stored
    /// together stay so.
    pub(super) fn stack_arguments(&mut self, values: &[Value]) -> Option<Elements> {
        let number = |value: &Value| match value.name {
            Name::Argument(number) if number < self.traced && !self.places.contains_key(&value.name) => {
                Some(number)
            }
            _ => None,
        };
        let numbers: Vec<usize> = values.iter().map(number).collect::<Option<_>>()?;
        let is_taken = |member: &usize| self.arguments.iter().any(|one| one.members.contains(member));
        let is_within =
            |members: &&Vec<usize>| positions(&numbers, members).is_some() && !members.iter().any(is_taken);
        let members = match self.together.iter().find(is_within) {
            Some(members) => members.clone(),
            None => numbers.clone(),
        };
        let (first, step) = positions(&numbers, &members)?;
        let stack = Stack::named(Name::Argument(self.shapes.len()), &values[0].shape, members.len());
        for (place, &member) in members.iter().enumerate() {
            self.record(Name::Argument(member), &stack, place);
        }
        self.shapes.push(stack.value.shape.clone());
        self.arguments.push(StackedArgument { members, stack: stack.clone(), updated: None });
        Some(Elements { stack, first, step })
    }

    /// The stacked argument whose storage these results reuse, one result per round, if no loop updates it yet: its
    /// index, and the elements that the rounds replace.
    pub(super) fn owner(
        &mut self,
        results: &BTreeMap<usize, Name>,
        rounds: usize,
    ) -> Option<(usize, Elements)> {
        let argument = |round: usize| {
            let number = *self.owners.get(results.get(&round)?)?;
            Some(Value { name: Name::Argument(number), shape: self.shapes[number].clone() })
        };
        let arguments: Vec<Value> = (0..rounds).map(argument).collect::<Option<_>>()?;
        let elements = self.find(&arguments, &[]).or_else(|| self.stack_arguments(&arguments))?;
        let is_owner = |one: &StackedArgument| one.stack.value.name == elements.stack.value.name;
        let owner = self.arguments.iter().position(is_owner)?;
        self.arguments[owner].updated.is_none().then_some((owner, elements))
    }

    /// Joins values to a stack. Neighbors in an existing stack are copied together.
    pub(super) fn join(&mut self, builder: &mut Builder, values: &[Value]) -> Elements {
        let mut parts = Vec::new();
        let mut rest = values;
        while !rest.is_empty() {
            let (part, len) = self.neighbors(builder, rest);
            parts.push(part);
            rest = &rest[len..];
        }
        let stack = Stack::of(builder, &parts, &values[0].shape);
        values.iter().enumerate().for_each(|(number, value)| self.record(value.name, &stack, number));
        Elements { stack, first: 0, step: 1 }
    }

    /// The first values that are neighbors in an existing stack, as one, or the first value; also returns their number.
    fn neighbors(&self, builder: &mut Builder, values: &[Value]) -> (Value, usize) {
        for len in (3..=values.len()).rev() {
            let found = self.find(&values[..len], &builder.operations);
            if let Some(elements) = found.filter(|found| found.step.abs() == 1) {
                let (first, last) = (elements.first, elements.index(len - 1));
                let range = first.min(last)..first.max(last) + 1;
                return (elements.stack.part(builder, range, elements.step < 0), len);
            }
        }
        (values[0].clone(), 1)
    }
}

/// First number and distance of at least two different numbers at equal distances.
pub(super) fn progression(numbers: &[usize]) -> Option<(usize, isize)> {
    let distance = |pair: &[usize]| pair[1] as isize - pair[0] as isize;
    let step = distance(numbers.get(..2)?);
    (step != 0 && numbers.windows(2).all(|pair| distance(pair) == step)).then(|| (numbers[0], step))
}

/// The positions of numbers in a list, if at equal distances.
fn positions(numbers: &[usize], list: &[usize]) -> Option<(usize, isize)> {
    let position = |number: &usize| list.iter().position(|other| other == number);
    progression(&numbers.iter().map(position).collect::<Option<Vec<usize>>>()?)
}
