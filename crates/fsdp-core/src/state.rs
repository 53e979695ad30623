//! The unit state machines: where a unit's parameters and its gradient are.
//!
//! ```text
//!   Sharded --gather--> Gathering --arrive--> Unsharded --reshard--> Sharded
//!   Sharded --upload--> Staged --gather staged--> Gathering
//!   Empty --open--> Accumulating --close--> Closed --reduce--> Reducing --arrive--> Summed --apply--> Empty
//!                        ^                   | ^                                     |
//!                        |                   | +------- total (unsharded sums) ------+
//!                        |                   +--------- fold (unsharded sums) ------>+
//!                        +------- open (the next micro-batch) -----------------------+
//!   Summed --download--> OnHost --apply--> Empty
//! ```
//! Buffers live inside the states that own them. Every event in a state that has no transition for it is
//! an error that names unit, state and event; nothing is silently ignored.

use crate::error::Error;

/// Where a unit's parameters are.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub enum ParamState<T> {
    /// Only the shard exists.
    #[default]
    Sharded,
    /// The shard was uploaded (or is being uploaded) into a staging slot.
    Staged {
        /// The staging slot.
        staging: usize,
    },
    /// An all-gather into a slot is in flight and owns the slot's buffers.
    Gathering {
        /// The slot.
        slot: usize,
    },
    /// The whole unit is in a slot.
    Unsharded {
        /// The slot.
        slot: usize,
        /// The slot's buffers.
        buffers: T,
    },
}

impl<T> ParamState<T> {
    /// The state's name in messages.
    pub const fn name(&self) -> &'static str {
        match self {
            ParamState::Sharded => "sharded",
            ParamState::Staged { .. } => "staged",
            ParamState::Gathering { .. } => "gathering",
            ParamState::Unsharded { .. } => "unsharded",
        }
    }

    fn illegal(&self, unit: &str, event: &'static str) -> Error {
        Error::Transition { unit: unit.into(), state: self.name(), event }
    }

    /// An upload into `staging` was issued.
    ///
    /// # Errors
    /// [`Error::Transition`] unless sharded.
    pub fn upload(&mut self, unit: &str, staging: usize) -> Result<(), Error> {
        match self {
            ParamState::Sharded => *self = ParamState::Staged { staging },
            _ => return Err(self.illegal(unit, "upload")),
        }
        Ok(())
    }

    /// An all-gather of what was uploaded into `staging` was issued, into `slot`.
    ///
    /// # Errors
    /// [`Error::Transition`] unless staged there.
    pub fn gather_staged(&mut self, unit: &str, staging: usize, slot: usize) -> Result<(), Error> {
        match *self {
            ParamState::Staged { staging: held } if held == staging => *self = ParamState::Gathering { slot },
            _ => return Err(self.illegal(unit, "gather what was uploaded")),
        }
        Ok(())
    }

    /// An all-gather into `slot` was issued.
    ///
    /// # Errors
    /// [`Error::Transition`] unless sharded.
    pub fn gather(&mut self, unit: &str, slot: usize) -> Result<(), Error> {
        match self {
            ParamState::Sharded => *self = ParamState::Gathering { slot },
            _ => return Err(self.illegal(unit, "gather")),
        }
        Ok(())
    }

    /// The all-gather gave the slot's buffers back.
    ///
    /// # Errors
    /// [`Error::Transition`] unless gathering.
    pub fn arrive(&mut self, unit: &str, buffers: T) -> Result<(), Error> {
        match *self {
            ParamState::Gathering { slot } => *self = ParamState::Unsharded { slot, buffers },
            _ => return Err(self.illegal(unit, "arrive")),
        }
        Ok(())
    }

    /// The buffers of the unsharded unit.
    ///
    /// # Errors
    /// [`Error::Transition`] unless unsharded.
    pub fn unsharded(&self, unit: &str) -> Result<&T, Error> {
        match self {
            ParamState::Unsharded { buffers, .. } => Ok(buffers),
            _ => Err(self.illegal(unit, "use")),
        }
    }

    /// Gives up the unsharded unit: returns the slot and its buffers.
    ///
    /// # Errors
    /// [`Error::Transition`] unless unsharded.
    pub fn reshard(&mut self, unit: &str) -> Result<(usize, T), Error> {
        match std::mem::replace(self, ParamState::Sharded) {
            ParamState::Unsharded { slot, buffers } => Ok((slot, buffers)),
            other => {
                *self = other;
                Err(self.illegal(unit, "reshard"))
            }
        }
    }
}

/// Where a unit's gradient is.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub enum GradientState<T> {
    /// There is none.
    #[default]
    Empty,
    /// Backward writes it into a slot.
    Accumulating {
        /// The slot.
        slot: usize,
    },
    /// The micro-batch's gradient (or the running sum) is complete, in a slot.
    Closed {
        /// The slot.
        slot: usize,
        /// The slot's buffers.
        buffers: T,
    },
    /// A reduce-scatter is in flight and owns the slot's buffers.
    Reducing {
        /// The slot.
        slot: usize,
    },
    /// Sums of at least one micro-batch are there (sharded, or unsharded partial sums), no slot is held.
    Summed,
    /// The total of the step is in host memory.
    OnHost,
}

impl<T> GradientState<T> {
    /// The state's name in messages.
    pub const fn name(&self) -> &'static str {
        match self {
            GradientState::Empty => "without gradient",
            GradientState::Accumulating { .. } => "accumulating its gradient",
            GradientState::Closed { .. } => "holding a complete gradient",
            GradientState::Reducing { .. } => "reducing its gradient",
            GradientState::Summed => "holding summed gradients",
            GradientState::OnHost => "holding summed gradients on the host",
        }
    }

    fn illegal(&self, unit: &str, event: &'static str) -> Error {
        Error::Transition { unit: unit.into(), state: self.name(), event }
    }

    /// Backward is about to write into `slot`, taken for this unit now.
    ///
    /// # Errors
    /// [`Error::Transition`] unless empty or summed.
    pub fn open(&mut self, unit: &str, slot: usize) -> Result<(), Error> {
        match self {
            GradientState::Empty | GradientState::Summed => *self = GradientState::Accumulating { slot },
            _ => return Err(self.illegal(unit, "open gradient")),
        }
        Ok(())
    }

    /// The micro-batch's gradient is complete.
    ///
    /// # Errors
    /// [`Error::Transition`] unless accumulating.
    pub fn close(&mut self, unit: &str, buffers: T) -> Result<(), Error> {
        match *self {
            GradientState::Accumulating { slot } => *self = GradientState::Closed { slot, buffers },
            _ => return Err(self.illegal(unit, "close gradient")),
        }
        Ok(())
    }

    /// The complete gradient is added into unsharded sums: returns the slot and its buffers.
    ///
    /// # Errors
    /// [`Error::Transition`] unless closed.
    pub fn fold(&mut self, unit: &str) -> Result<(usize, T), Error> {
        match std::mem::take(self) {
            GradientState::Closed { slot, buffers } => {
                *self = GradientState::Summed;
                Ok((slot, buffers))
            }
            other => {
                *self = other;
                Err(self.illegal(unit, "fold"))
            }
        }
    }

    /// The total of the unsharded sums is in `slot` again.
    ///
    /// # Errors
    /// [`Error::Transition`] unless summed.
    pub fn total(&mut self, unit: &str, slot: usize, buffers: T) -> Result<(), Error> {
        match self {
            GradientState::Summed => *self = GradientState::Closed { slot, buffers },
            _ => return Err(self.illegal(unit, "take the total")),
        }
        Ok(())
    }

    /// A reduce-scatter is issued: returns the slot's buffers.
    ///
    /// # Errors
    /// [`Error::Transition`] unless closed.
    pub fn reduce(&mut self, unit: &str) -> Result<T, Error> {
        match std::mem::take(self) {
            GradientState::Closed { slot, buffers } => {
                *self = GradientState::Reducing { slot };
                Ok(buffers)
            }
            other => {
                *self = other;
                Err(self.illegal(unit, "reduce"))
            }
        }
    }

    /// The reduce-scatter is complete: returns the slot, which is free now.
    ///
    /// # Errors
    /// [`Error::Transition`] unless reducing.
    pub fn arrive(&mut self, unit: &str) -> Result<usize, Error> {
        match *self {
            GradientState::Reducing { slot } => {
                *self = GradientState::Summed;
                Ok(slot)
            }
            _ => Err(self.illegal(unit, "arrive")),
        }
    }

    /// The total is moved to host memory.
    ///
    /// # Errors
    /// [`Error::Transition`] unless summed.
    pub fn download(&mut self, unit: &str) -> Result<(), Error> {
        match self {
            GradientState::Summed => *self = GradientState::OnHost,
            _ => return Err(self.illegal(unit, "download")),
        }
        Ok(())
    }

    /// The sums are applied to the parameters.
    ///
    /// # Errors
    /// [`Error::Transition`] unless summed, on the device or the host.
    pub fn apply(&mut self, unit: &str) -> Result<(), Error> {
        match self {
            GradientState::Summed | GradientState::OnHost => *self = GradientState::Empty,
            _ => return Err(self.illegal(unit, "apply")),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
