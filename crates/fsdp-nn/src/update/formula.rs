//! The formula of an element-wise rule as a list of calculations.

use std::cell::RefCell;
use std::convert::Infallible;
use std::ops::{Add, Div, Mul, Sub};

use super::elementwise::{Elementwise, Number, STATES_MAX};

/// A number that a formula is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Input {
    /// The gradient of the mean loss, clipped.
    Gradient,
    /// The parameter.
    Param,
    /// A value of optimizer state.
    State(usize),
    /// A factor of the step and the parameter.
    Factor(usize),
    /// A constant of the rule.
    Constant(usize),
}

/// An operand of a calculation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Term {
    /// A number that the formula is given.
    Input(Input),
    /// The result of an earlier calculation.
    Result(usize),
}

/// One calculation; a result that is not exact is rounded once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Calculation<T> {
    /// A sum.
    Add(T, T),
    /// A difference.
    Subtract(T, T),
    /// A product.
    Multiply(T, T),
    /// A quotient.
    Divide(T, T),
    /// A square root.
    SquareRoot(T),
    /// The third operand if the first is less than the second, else the fourth.
    IfLess(T, T, T, T),
}

impl<T> Calculation<T> {
    /// The calculation with other operands.
    pub fn map<'a, U>(&'a self, mut of: impl FnMut(&'a T) -> U) -> Calculation<U> {
        match self {
            Self::Add(a, b) => Calculation::Add(of(a), of(b)),
            Self::Subtract(a, b) => Calculation::Subtract(of(a), of(b)),
            Self::Multiply(a, b) => Calculation::Multiply(of(a), of(b)),
            Self::Divide(a, b) => Calculation::Divide(of(a), of(b)),
            Self::SquareRoot(a) => Calculation::SquareRoot(of(a)),
            Self::IfLess(a, b, c, d) => Calculation::IfLess(of(a), of(b), of(c), of(d)),
        }
    }
}

/// The calculations of a rule for one element. Rules with other factors and constants may have the same formula.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Formula {
    /// In order: operands are results of earlier ones.
    pub calculations: Vec<Calculation<Term>>,
    /// The new parameter; `None` if it is not changed.
    pub param: Option<Term>,
    /// The new state.
    pub state: Vec<Term>,
    /// Number of factors.
    pub factors: usize,
    /// Number of constants.
    pub constants: usize,
}

impl Formula {
    /// Calculates the new parameter, if it changes, and the new state.
    ///
    /// # Errors
    /// Those of `calculate`.
    pub fn run<V: Clone, E>(
        &self,
        input: impl Fn(Input) -> V,
        mut calculate: impl FnMut(Calculation<V>) -> Result<V, E>,
    ) -> Result<(Option<V>, Vec<V>), E> {
        let mut results: Vec<V> = Vec::with_capacity(self.calculations.len());
        let value = |results: &[V], term: &Term| match *term {
            Term::Input(of) => input(of),
            Term::Result(index) => results[index].clone(),
        };
        for calculation in &self.calculations {
            let result = calculate(calculation.map(|term| value(&results, term)))?;
            results.push(result);
        }
        let state = self.state.iter().map(|term| value(&results, term)).collect();
        Ok((self.param.as_ref().map(|term| value(&results, term)), state))
    }

    /// As [`Formula::run`], for calculations that cannot fail.
    pub fn results<V: Clone>(
        &self,
        input: impl Fn(Input) -> V,
        mut calculate: impl FnMut(Calculation<V>) -> V,
    ) -> (Option<V>, Vec<V>) {
        let Ok(results) = self.run(input, |calculation| Ok::<V, Infallible>(calculate(calculation)));
        results
    }
}

/// What is recorded.
#[derive(Default)]
struct Record {
    calculations: Vec<Calculation<Term>>,
    constants: Vec<f64>,
}

/// A number of a formula that is being recorded.
#[derive(Clone, Copy)]
struct Recorded<'r> {
    record: &'r RefCell<Record>,
    term: Term,
}

impl Recorded<'_> {
    fn input(self, input: Input) -> Self {
        Self { term: Term::Input(input), ..self }
    }

    fn calculate(self, calculation: Calculation<Term>) -> Self {
        let calculations = &mut self.record.borrow_mut().calculations;
        calculations.push(calculation);
        Self { term: Term::Result(calculations.len() - 1), ..self }
    }
}

macro_rules! operators {
    ($($operator:ident $method:ident $calculation:ident;)*) => {$(
        impl $operator for Recorded<'_> {
            type Output = Self;

            fn $method(self, other: Self) -> Self {
                self.calculate(Calculation::$calculation(self.term, other.term))
            }
        }
    )*};
}

operators! {
    Add add Add;
    Sub sub Subtract;
    Mul mul Multiply;
    Div div Divide;
}

impl Number for Recorded<'_> {
    fn constant(self, value: f64) -> Self {
        let constants = &mut self.record.borrow_mut().constants;
        let index = constants.iter().position(|known| known.to_bits() == value.to_bits());
        let index = index.unwrap_or_else(|| {
            constants.push(value);
            constants.len() - 1
        });
        self.input(Input::Constant(index))
    }

    fn square_root(self) -> Self {
        self.calculate(Calculation::SquareRoot(self.term))
    }

    fn if_less(self, other: Self, then: Self, otherwise: Self) -> Self {
        self.calculate(Calculation::IfLess(self.term, other.term, then.term, otherwise.term))
    }
}

/// Records the formula of a rule with so many factors, and returns it with the values of its constants.
pub(super) fn record(rule: &impl Elementwise, factors: usize) -> (Formula, Vec<f64>) {
    let record = RefCell::new(Record::default());
    let of = |input| Recorded { record: &record, term: Term::Input(input) };
    let inputs: Vec<Recorded<'_>> = (0..factors).map(|index| of(Input::Factor(index))).collect();
    let mut state: [Recorded<'_>; STATES_MAX] = std::array::from_fn(|index| of(Input::State(index)));
    let param = rule.step(&inputs, of(Input::Gradient), of(Input::Param), &mut state);
    let state = state[..rule.state().len()].iter().map(|value| value.term).collect();
    let param = Some(param.term).filter(|term| *term != Term::Input(Input::Param));
    let Record { calculations, constants } = record.into_inner();
    (Formula { calculations, param, state, factors, constants: constants.len() }, constants)
}
