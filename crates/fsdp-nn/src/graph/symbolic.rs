//! Symbolic execution of calls: places hold terms, which say how their contents were computed.
//!
//! Two lists of calls that leave the same terms compute the same bits, wherever they keep values and whatever they
//! compute twice.

use std::collections::{BTreeMap, HashMap};

use fsdp_core::model::{BlockId, ParamId};

use super::{Call, Operand};
use crate::error::PlanFault;
use crate::op::{Access, Op, Pointwise};

/// Index of an expression; equal expressions have equal terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Term(usize);

/// The contents of a place: the term of each range that was written, and whether it was read since.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Contents(BTreeMap<(usize, usize), (Term, bool)>);

impl Contents {
    /// The terms of all ranges.
    pub(crate) fn terms(&self) -> Vec<((usize, usize), Term)> {
        self.0.iter().map(|(&range, &(term, _))| (range, term)).collect()
    }
}

/// What a call accesses beside places.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Table {
    Gradient(ParamId),
    Losses,
    ZLosses,
    Load(BlockId),
    RouterLoss,
}

/// The terms made so far, and the contents of the tables that calls write.
#[derive(Debug, Default)]
pub(crate) struct Symbols {
    terms: HashMap<(String, Vec<Term>), Term>,
    /// What calls have written beside places.
    pub(crate) tables: BTreeMap<Table, Contents>,
}

/// The range of everything that lies outside of places.
const ALL: (usize, usize) = (0, 0);

impl Symbols {
    /// The term of an expression.
    fn term(&mut self, what: &str, of: Vec<Term>) -> Term {
        let next = Term(self.terms.len());
        *self.terms.entry((what.to_owned(), of)).or_insert(next)
    }

    /// The same two terms have the same sum in either order.
    fn sum(&mut self, mut of: [Term; 2]) -> Term {
        of.sort();
        self.term("sum", of.to_vec())
    }

    /// Executes a call on the live places of a block with these parameters.
    pub(crate) fn execute(
        &mut self,
        call: &Call,
        (block, params): (BlockId, &[ParamId]),
        places: &mut [Option<Contents>],
    ) -> Result<(), PlanFault> {
        let reads =
            call.reads.iter().map(|read| self.read(*read, params, places)).collect::<Result<Vec<_>, _>>()?;
        let roles = call.op.describe().writes;
        let (mut inputs, mut sums) = (reads.clone(), Vec::new());
        for (&(operand, add), role) in call.writes.iter().zip(&roles) {
            let adds = (add && role.access == Access::Add) || self.has_gradient(operand, params);
            let is_updated = role.access == Access::Update;
            let old = match adds || is_updated {
                true => Some(self.contents_of(operand, block, params, places)?),
                false => None,
            };
            inputs.extend(old.filter(|_| is_updated));
            sums.push(old.filter(|_| adds || matches!(call.op, Op::Pointwise(Pointwise::Accumulate { .. }))));
        }
        let key = match call.site {
            Some(site) => format!("{:?} at {site} of {block:?}", call.op),
            None => format!("{:?}", call.op),
        };
        let result = self.term(&key, inputs);
        for (index, ((&(operand, _), role), old)) in call.writes.iter().zip(&roles).zip(sums).enumerate() {
            let new = match &call.op {
                _ if role.access == Access::Scratch => None,
                Op::Pointwise(Pointwise::Copy { .. }) => Some(reads[0]),
                Op::Pointwise(Pointwise::Add { .. }) => Some(self.sum([reads[0], reads[1]])),
                Op::Pointwise(Pointwise::Accumulate { .. }) => old.map(|old| self.sum([reads[0], old])),
                _ => {
                    let new = self.term(&format!("output {index}"), vec![result]);
                    Some(old.map_or(new, |old| self.sum([old, new])))
                }
            };
            self.write(operand, new, (block, params), places)?;
        }
        Ok(())
    }

    fn has_gradient(&self, operand: Operand, params: &[ParamId]) -> bool {
        let table = |index: usize| self.tables.get(&Table::Gradient(params[index]));
        matches!(operand, Operand::ParamGradient(index) if table(index).is_some())
    }

    /// The term that a call reads.
    fn read(
        &mut self,
        operand: Operand,
        params: &[ParamId],
        places: &mut [Option<Contents>],
    ) -> Result<Term, PlanFault> {
        match operand {
            Operand::Local { id, offset, len } => {
                self.contents(places[id].as_mut().ok_or(PlanFault::NotLive)?, (offset, len))
            }
            Operand::Param(index) => Ok(self.term(&format!("{:?}", params[index]), Vec::new())),
            Operand::Loads => {
                let is_load = |table: &Table| matches!(table, Table::Load(_));
                let loads = self.tables.iter_mut().filter(|(table, _)| is_load(table));
                let parts = loads.flat_map(|(_, contents)| contents.0.values_mut());
                let terms = parts.map(|(term, is_read)| {
                    *is_read = true;
                    *term
                });
                let terms = terms.collect();
                Ok(self.term("loads", terms))
            }
            other => Ok(self.term(&format!("{other:?}"), Vec::new())),
        }
    }

    /// The term of the previous contents of a written operand.
    fn contents_of(
        &mut self,
        operand: Operand,
        block: BlockId,
        params: &[ParamId],
        places: &mut [Option<Contents>],
    ) -> Result<Term, PlanFault> {
        let Some(table) = table(operand, block, params) else { return self.read(operand, params, places) };
        let mut contents = self.tables.remove(&table).ok_or(PlanFault::Unwritten)?;
        let term = self.contents(&mut contents, ALL);
        self.tables.insert(table, contents);
        term
    }

    /// The term of a range: the one that was written to it, or one that is made of all ranges.
    fn contents(&mut self, contents: &mut Contents, range: (usize, usize)) -> Result<Term, PlanFault> {
        if let Some((term, is_read)) = contents.0.get_mut(&range) {
            *is_read = true;
            return Ok(*term);
        }
        if contents.0.is_empty() {
            return Err(PlanFault::Unwritten);
        }
        contents.0.values_mut().for_each(|(_, is_read)| *is_read = true);
        let (ranges, terms): (Vec<_>, Vec<_>) = contents.terms().into_iter().unzip();
        Ok(self.term(&format!("{range:?} of {ranges:?}"), terms))
    }

    fn write(
        &mut self,
        operand: Operand,
        term: Option<Term>,
        (block, params): (BlockId, &[ParamId]),
        places: &mut [Option<Contents>],
    ) -> Result<(), PlanFault> {
        let (contents, range) = match operand {
            Operand::Local { id, offset, len } => {
                (places[id].as_mut().ok_or(PlanFault::NotLive)?, (offset, len))
            }
            other => {
                let table = table(other, block, params).ok_or(PlanFault::ReadOnly)?;
                (self.tables.entry(table).or_default(), ALL)
            }
        };
        // A second forward leaves the same load again.
        let is_load_again = operand == Operand::Load && contents.0.get(&range).map(|(old, _)| *old) == term;
        let is_covered =
            |(offset, len): (usize, usize)| range.0 <= offset && offset + len <= range.0 + range.1;
        let mut covered = contents.0.iter().filter(|(other, _)| is_covered(**other));
        if !is_load_again && covered.any(|(_, (_, is_read))| !is_read) {
            return Err(PlanFault::Unread);
        }
        contents.0.retain(|other, _| !is_covered(*other));
        contents.0.extend(term.map(|term| (range, (term, false))));
        Ok(())
    }
}

/// The table that an operand lies in, if a call can write it.
fn table(operand: Operand, block: BlockId, params: &[ParamId]) -> Option<Table> {
    match operand {
        Operand::ParamGradient(index) => Some(Table::Gradient(params[index])),
        Operand::Losses => Some(Table::Losses),
        Operand::ZLosses => Some(Table::ZLosses),
        Operand::Load => Some(Table::Load(block)),
        Operand::RouterLoss => Some(Table::RouterLoss),
        _ => None,
    }
}
