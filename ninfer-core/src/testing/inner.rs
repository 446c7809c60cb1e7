//! Operations of a counting backend as operations of the wrapped one.

use super::Counting;
use crate::ops::{
    Accept, Attend, Choose, CopyRows, Count, Embed, Experts, GdnFold, GdnMix, GdnParams, GdnRecord, GdnState, Head,
    HeadArgmax, KvLayer, KvScales, MtpStem, Norm, OutputGate, Project, ProjectAdd, RmsNorm, RopeAppend, RopeTable,
    Route, Swiglu,
};
use crate::segment::{Batch, Profile};
use crate::shape::GdnShape;
use crate::{Backend, DeviceBuffer, Result, View};

/// The same thing as the wrapped backend knows it.
pub(super) trait Inner {
    type Out;
    fn inner(&self) -> Result<Self::Out>;
}

/// Things that name no backend.
macro_rules! plain {
    ($($type:ty),+) => {
        $(impl Inner for $type {
            type Out = Self;
            fn inner(&self) -> Result<Self> {
                Ok(*self)
            }
        })+
    };
}

plain!(bool, u32, usize, f32, GdnShape, OutputGate, Profile);

impl<T: Inner> Inner for Option<T> {
    type Out = Option<T::Out>;
    fn inner(&self) -> Result<Self::Out> {
        self.as_ref().map(T::inner).transpose()
    }
}

impl<B: Backend> Inner for View<Counting<B>> {
    type Out = View<B>;

    fn inner(&self) -> Result<View<B>> {
        let size = self.dtype().size();
        if self.rows() <= 1 || self.cols() == 0 {
            return View::new(self.buffer().clone(), self.dtype(), self.offset(), self.rows(), self.cols());
        }
        // The columns of this view are cut from a matrix of `stride` columns that lies inside the buffer. Of all places where
        // they may stand in it, take the leftmost for which its last row ends inside the buffer.
        let row = self.stride() * size;
        let end = self.offset() + self.rows() * row;
        let left = end.saturating_sub(self.buffer().len()).div_ceil(size);
        let offset = self.offset().saturating_sub(left * size);
        let whole = View::new(self.buffer().clone(), self.dtype(), offset, self.rows(), self.stride())?;
        whole.col_range(left..left + self.cols())
    }
}

/// Parameter structs: fields that are converted, then weights, which both backends share.
macro_rules! structs {
    ($($name:ident { $($field:ident),* $(; $($weight:ident),+)? })+) => {
        $(impl<B: Backend> Inner for $name<Counting<B>> {
            type Out = $name<B>;
            fn inner(&self) -> Result<$name<B>> {
                Ok($name { $($field: self.$field.inner()?,)* $($($weight: self.$weight.clone(),)+)? })
            }
        })+
    };
}

structs! {
    Batch { profile, rows, segments, table }
    Norm { gain, eps }
    KvLayer { keys, values, scales, pages, heads }
    KvScales { keys, values }
    RopeTable { frequencies, magnitude, shift }
    GdnParams { dims, conv, a_log, dt_bias, gain, eps, gate }
    GdnState { window, matrix }
    GdnRecord { width, columns, key_value, gates }
    ProjectAdd { batch, input, residual; weight }
    Swiglu { batch, input, norm, output; gate_up }
    Embed { batch, ids, output; table }
    RmsNorm { batch, input, norm, output }
    MtpStem { batch, ids, hidden, index, embedding_norm, hidden_norm, output; table, fc }
    CopyRows { src, src_index, dst, dst_index }
    RopeAppend { batch, query_gate, key, value, gains, eps, rope, query, kv }
    Attend { batch, query, query_gate, kv, first_key, output }
    GdnMix { batch, qkv, z, a, b, params, state, record, output }
    GdnFold { batch, params, state, record }
    Route { batch, input, norm, renormalise, hidden, experts, weights; router, shared_gate }
    Experts { batch, hidden, experts, weights, residual; gate_up, down, shared_gate_up, shared_down }
    Head { batch, input, logits; head }
    HeadArgmax { batch, input, limit, output; head }
    Choose { batch, logits, ids, params, counts, limit, output }
    Count { batch, ids, previous, counts }
    Accept { batch, ids, chosen, result, realign, last, chain }
}

impl<B: Backend> Inner for Project<Counting<B>> {
    type Out = Project<B>;

    fn inner(&self) -> Result<Project<B>> {
        let parts = self.parts.iter().map(|(weight, out)| Ok((weight.clone(), out.inner()?)));
        Ok(Project {
            batch: self.batch.inner()?,
            input: self.input.inner()?,
            norm: self.norm.inner()?,
            parts: parts.collect::<Result<_>>()?,
        })
    }
}
