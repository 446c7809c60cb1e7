//! The families of operations.
//!
//! An operation is as large as the fused kernel that a good engine wants, so that faster routes never change these
//! traits. Each is one method of a family with one parameter struct of named fields; [`Recorder`](crate::Recorder) checks
//! it in one place for all backends: shapes, element types, and that no written view overlaps another. The CPU backend's
//! plain f32 loops are the definition of every operation.
//!
//! Notation: `T` rows of the call, `H` hidden size, `V` vocabulary rows, `Hq`/`Hkv`/`D` attention heads and head size,
//! `Hk`/`Hv`/`dk`/`dv` Gated-DeltaNet heads and sizes, `C = 2·Hk·dk + Hv·dv`, `E` experts, `k` experts per token. "act" is
//! [`Backend::activation_dtype`](crate::Backend::activation_dtype). Rows that belong to no segment are padding: their outputs are unspecified.
//!
//! Every product `x · Wᵀ` first does to each row of `x` what the weight's
//! [`ActivationPrecision`](crate::format::ActivationPrecision) says: usually nothing.

pub mod attention;
mod check;
pub mod gdn;
pub mod linear;
pub mod moe;
pub mod norm;
pub mod sample;

pub use attention::{Attend, AttentionOps, KvLayer, KvScales, RopeAppend, RopeTable};
pub use gdn::{GdnFold, GdnMix, GdnOps, GdnParams, GdnRecord, GdnState, OutputGate};
pub use linear::{LinearOps, Project, ProjectAdd, Swiglu};
pub use moe::{Experts, MoeOps, Route};
pub use norm::{CopyRows, Embed, MtpStem, Norm, NormOps, RmsNorm};
pub use sample::{Accept, Choose, Count, Head, HeadArgmax, SampleOps};

pub(crate) use check::Check;

/// All families together.
pub trait Ops: LinearOps + NormOps + AttentionOps + GdnOps + MoeOps + SampleOps {}

impl<B: LinearOps + NormOps + AttentionOps + GdnOps + MoeOps + SampleOps> Ops for B {}

/// Declares the recorder's methods of a family: check the operation, then hand it to the backend.
macro_rules! recorder_methods {
    ($family:ident: $($(#[$doc:meta])* $name:ident($op:ident)),+ $(,)?) => {
        impl<B: $family> crate::Recorder<'_, B> {
            $(
                $(#[$doc])*
                ///
                /// # Errors
                /// Shape and dtype errors naming the argument, [`Error::Aliased`](crate::Error::Aliased) for a written view that
                /// overlaps another one, and what the backend reports.
                pub fn $name(&mut self, op: $op<B>) -> crate::Result<()> {
                    op.check()?;
                    self.backend.$name(self.queue, op)
                }
            )+
        }
    };
}
pub(crate) use recorder_methods;
