//! Models that a program may have computed by mistake.

/// A model that a program may have computed by mistake.
#[derive(Clone, Debug)]
pub struct Variant<A> {
    /// What it does, as a sentence for the user.
    pub text: String,
    /// A size divided by that of the job's model, if it is one size that differs.
    pub factor: Option<f64>,
    /// The model.
    pub architecture: A,
}

/// Which sizes a setting may have besides the likely ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Between {
    /// None.
    Nothing,
    /// Any number: the gradient changes evenly with it.
    Linear,
    /// Any positive number: the gradient changes evenly with its logarithm.
    Logarithmic,
}

/// A setting with which a program may have computed another model.
pub struct Setting<A> {
    /// The size in the job's model, if the setting has one.
    pub stated: Option<f64>,
    /// Sizes that are likely.
    pub sizes: Vec<f64>,
    /// Which other sizes there may be.
    pub between: Between,
    /// Whether the model draws random numbers, as with dropout: the size is its rate.
    pub is_random: bool,
    /// The model with a size; `None` if there is none.
    pub model: Box<dyn Fn(f64) -> Option<Variant<A>> + Send + Sync>,
}
