//! Who holds which gradient, from the slot that backward writes to the total of the step.

use super::{Access, Gradient, Resource, Tenancy, write};
use crate::checker::Violation;

impl Tenancy<'_> {
    pub(super) fn open_slot(&self, unit: usize) -> Result<usize, Violation> {
        match self.gradients.get(&unit) {
            Some(&Gradient { slot, closed: false }) => Ok(slot),
            _ => Err(Violation::GradientNotOpen { unit: self.name(unit).into() }),
        }
    }

    fn closed_slot(&self, unit: usize) -> Result<usize, Violation> {
        match self.gradients.get(&unit) {
            Some(&Gradient { slot, closed: true }) => Ok(slot),
            _ => Err(Violation::GradientNotClosed { unit: self.name(unit).into() }),
        }
    }

    pub(super) fn open_gradient(&mut self, unit: usize, slot: usize) -> Result<Vec<Access>, Violation> {
        let tenant = self.gradients.iter().find(|&(&tenant, held)| held.slot == slot || tenant == unit);
        if let Some((&tenant, _)) = tenant {
            let (unit, tenant) = (self.name(unit).into(), self.name(tenant).into());
            return Err(Violation::SlotTaken { slot, unit, tenant });
        }
        self.gradients.insert(unit, Gradient { slot, closed: false });
        Ok(vec![write(Resource::GradientSlot(slot)), write(Resource::GradientStay(unit))])
    }

    pub(super) fn close_gradient(&mut self, unit: usize) -> Result<Vec<Access>, Violation> {
        let slot = self.open_slot(unit)?;
        self.gradients.insert(unit, Gradient { slot, closed: true });
        Ok(vec![write(Resource::GradientSlot(slot))])
    }

    pub(super) fn fold_unsharded(&mut self, unit: usize, last: bool) -> Result<Vec<Access>, Violation> {
        let slot = self.closed_slot(unit)?;
        if !last {
            self.gradients.remove(&unit);
        }
        Ok(vec![write(Resource::GradientSlot(slot)), write(Resource::UnshardedSums(unit))])
    }

    pub(super) fn reduce_scatter(
        &mut self,
        unit: usize,
        into: Option<usize>,
    ) -> Result<Vec<Access>, Violation> {
        let slot = self.closed_slot(unit)?;
        if !self.incoming.insert(unit) {
            return Err(Violation::NotFolded { unit: self.name(unit).into() });
        }
        self.gradients.remove(&unit);
        let mut accesses = vec![
            write(Resource::GradientSlot(slot)),
            write(Resource::GradientStay(unit)),
            write(Resource::Incoming(unit)),
        ];
        if let Some(slot) = into {
            let tenant = self.reduced.iter().find(|&(&tenant, &held)| held == slot || tenant == unit);
            if let Some((&tenant, _)) = tenant {
                let (unit, tenant) = (self.name(unit).into(), self.name(tenant).into());
                return Err(Violation::SlotTaken { slot, unit, tenant });
            }
            self.reduced.insert(unit, slot);
            accesses.push(write(Resource::ReducedSlot(slot)));
        }
        Ok(accesses)
    }

    pub(super) fn total(&self, unit: usize) -> Result<(), Violation> {
        if self.totals.contains(&unit) {
            return Ok(());
        }
        Err(Violation::NoTotal { unit: self.name(unit).into() })
    }

    pub(super) fn download(&mut self, unit: usize, slot: Option<usize>) -> Result<Vec<Access>, Violation> {
        self.total(unit)?;
        self.totals.remove(&unit);
        if self.reduced.remove(&unit) != slot {
            return Err(Violation::SlotMismatch { slot: slot.unwrap_or(0), unit: self.name(unit).into() });
        }
        let mut accesses = vec![write(Resource::ShardedGradient(unit))];
        accesses.extend(slot.map(|slot| write(Resource::ReducedSlot(slot))));
        Ok(accesses)
    }

    pub(super) fn fold(&mut self, unit: usize, last: bool) -> Result<Vec<Access>, Violation> {
        if !self.incoming.remove(&unit) {
            return Err(Violation::NothingToFold { unit: self.name(unit).into() });
        }
        if last {
            self.totals.insert(unit);
        }
        Ok(vec![write(Resource::Incoming(unit)), write(Resource::ShardedGradient(unit))])
    }
}
