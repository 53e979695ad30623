//! What an operation says of itself: its name, what it reads and writes, and its work.

use fsdp_core::DType;

/// The element type of an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The float dtype that all values of a call share.
    Value,
    /// The master dtype of the values.
    Statistic,
    /// Any float dtype: slots of gradients have their own.
    Gradient,
    /// A dtype of its own.
    Of(DType),
}

/// What is done to an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// It is read.
    Read,
    /// It is overwritten.
    Overwrite,
    /// It is overwritten, or added to where the call says so.
    Add,
    /// It is read, and then overwritten.
    Update,
    /// Its contents do not matter before or after.
    Scratch,
}

/// One operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Role {
    /// What it is called.
    pub name: &'static str,
    /// Elements.
    pub len: usize,
    /// Whether there may be more elements.
    pub or_more: bool,
    /// Elements that are touched: of a table that is looked up, or scratch that is used again, not its length.
    pub touched: usize,
    /// Their type.
    pub kind: Kind,
    /// What is done to it.
    pub access: Access,
}

impl Role {
    fn new(name: &'static str, len: usize, kind: Kind) -> Self {
        Self { name, len, or_more: false, touched: len, kind, access: Access::Read }
    }

    /// Elements of the dtype that all values of the call share.
    pub(super) fn value(name: &'static str, len: usize) -> Self {
        Self::new(name, len, Kind::Value)
    }

    /// Elements of the type of arithmetic.
    pub(super) fn statistic(name: &'static str, len: usize) -> Self {
        Self::new(name, len, Kind::Statistic)
    }

    /// Elements of any float dtype.
    pub(super) fn gradient(name: &'static str, len: usize) -> Self {
        Self::new(name, len, Kind::Gradient)
    }

    /// Tokens, classes or positions.
    pub(super) fn ids(name: &'static str, len: usize) -> Self {
        Self::new(name, len, Kind::Of(DType::U32))
    }

    /// One loss per row.
    pub(super) fn losses(rows: usize) -> Self {
        Self::double("losses", rows)
    }

    /// Numbers in double precision, whatever the values are.
    pub(super) fn double(name: &'static str, len: usize) -> Self {
        Self::new(name, len, Kind::Of(DType::F64))
    }

    pub(super) fn touching(self, touched: usize) -> Self {
        Self { touched, ..self }
    }

    /// It may be longer; so many elements are touched.
    pub(super) fn or_more(self, touched: usize) -> Self {
        Self { or_more: true, touched, ..self }
    }

    /// The call says whether it is overwritten or added to.
    pub(super) fn adds(self) -> Self {
        Self { access: Access::Add, ..self }
    }

    pub(super) fn updated(self) -> Self {
        Self { access: Access::Update, ..self }
    }

    pub(super) fn scratch(self) -> Self {
        Self { access: Access::Scratch, ..self }
    }
}

/// What an operation says of itself: made by adding one thing after the other.
#[derive(Clone, Debug, PartialEq)]
pub struct Description {
    /// What it is called in listings, traces and errors.
    pub name: &'static str,
    /// What is only read, in order.
    pub reads: Vec<Role>,
    /// What is written, in order.
    pub writes: Vec<Role>,
    /// The product that it is or is made of, as rows, columns and terms of each sum: `[m, n, k]`.
    pub matmul: Option<[usize; 3]>,
    /// Constants of its formula, which kernels take beside operands and sizes.
    pub constants: Vec<f64>,
    /// Floating-point operations of products.
    pub(super) product_flops: u64,
    /// Other floating-point operations.
    pub(super) other_flops: u64,
    /// How many dropout keys it takes: one per sample, where it drops anything.
    pub(super) keys: usize,
    /// How many rows the documents have that it asks for; 0 if it does not.
    pub(super) document_rows: usize,
    /// How many rows there are of which it asks which ones count; 0 if it does not.
    pub(super) counted_rows: usize,
    /// Whether its output is computed again for backward instead of being kept.
    pub(crate) is_recomputed: bool,
}

impl Description {
    pub(super) fn new(name: &'static str) -> Self {
        let (reads, writes) = (Vec::new(), Vec::new());
        Self {
            name,
            reads,
            writes,
            matmul: None,
            constants: Vec::new(),
            product_flops: 0,
            other_flops: 0,
            keys: 0,
            document_rows: 0,
            counted_rows: 0,
            is_recomputed: false,
        }
    }

    pub(super) fn read(mut self, roles: impl IntoIterator<Item = Role>) -> Self {
        self.reads.extend(roles);
        self
    }

    /// Roles that say nothing else are overwritten.
    pub(super) fn write(mut self, roles: impl IntoIterator<Item = Role>) -> Self {
        self.writes.extend(roles.into_iter().map(|role| match role.access {
            Access::Read => Role { access: Access::Overwrite, ..role },
            _ => role,
        }));
        self
    }

    pub(super) fn constant(mut self, value: f64) -> Self {
        self.constants.push(value);
        self
    }

    /// So many products of `m x k` with `k x n` matrices.
    pub(super) fn products(self, count: u64, [m, n, k]: [usize; 3]) -> Self {
        Self { matmul: Some([m, n, k]), ..self }.product_flops(count * 2 * (m * n * k) as u64)
    }

    pub(super) fn product_flops(self, product_flops: u64) -> Self {
        Self { product_flops, ..self }
    }

    /// Operations that are no products, about: one for each arithmetic function of a number.
    pub(super) fn flops(self, count: usize) -> Self {
        Self { other_flops: count as u64, ..self }
    }

    /// It drops elements of so many samples with probability `p`.
    pub(super) fn drops(self, p: f64, samples: usize) -> Self {
        Self { keys: if p > 0.0 { samples } else { 0 }, ..self }
    }

    /// It asks for the documents of so many rows.
    pub(super) fn of_documents(self, document_rows: usize) -> Self {
        Self { document_rows, ..self }
    }

    /// It asks which of so many rows count.
    pub(super) fn of_counted(self, counted_rows: usize) -> Self {
        Self { counted_rows, ..self }
    }

    pub(super) fn recomputed(self) -> Self {
        Self { is_recomputed: true, ..self }
    }

    /// Whether it makes products: selective checkpointing keeps their outputs.
    pub(crate) fn is_product(&self) -> bool {
        self.product_flops > 0
    }
}
