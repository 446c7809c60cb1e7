//! What is done with one matrix.

use ninfer_core::format::ActivationPrecision;
use ninfer_core::{PackedRef, WeightFormat};

use crate::bridge::{BridgeScale, bridge};
use crate::{PackedMatrix, Result, encode_ref, fp8};

/// One change of format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Conversion {
    /// None: the matrix stays as stored.
    Keep,
    /// It is decoded and encoded in this format. One FP8 scale for the matrix becomes one per row without decoding.
    To(WeightFormat),
    /// NVFP4 becomes FP8 by [`bridge`]; other formats stay as stored.
    Bridge(BridgeScale),
}

impl Conversion {
    /// The format of a matrix after the conversion.
    #[must_use]
    pub const fn result(self, stored: WeightFormat) -> WeightFormat {
        match (self, stored) {
            (Self::To(format), _) => format,
            (Self::Bridge(BridgeScale::Pow2Block), WeightFormat::Nvfp4) => WeightFormat::Fp8Block,
            (Self::Bridge(_), WeightFormat::Nvfp4) => WeightFormat::Fp8Row,
            (Self::Keep | Self::Bridge(_), _) => stored,
        }
    }

    /// Whether a matrix stored in this format stays as it is.
    fn keeps(self, stored: WeightFormat) -> bool {
        match self {
            Self::Keep => true,
            Self::To(format) => format == stored,
            Self::Bridge(_) => stored != WeightFormat::Nvfp4,
        }
    }

    fn apply(self, m: PackedMatrix) -> Result<PackedMatrix> {
        match (self, m.format()) {
            (Self::To(WeightFormat::Fp8Row), WeightFormat::Fp8Tensor) => Ok(fp8::widen_to_rows(m)),
            (_, stored) if self.keeps(stored) => Ok(m),
            _ => self.apply_ref(&m.as_ref()),
        }
    }

    fn apply_ref(self, m: &PackedRef<'_>) -> Result<PackedMatrix> {
        match (self, m.format()) {
            (Self::To(WeightFormat::Fp8Row), WeightFormat::Fp8Tensor) => {
                Ok(fp8::widen_to_rows(PackedMatrix::from_ref(m)?))
            }
            (Self::To(to), from) if to != from => encode_ref(to, m),
            (Self::Bridge(scale), WeightFormat::Nvfp4) => bridge(m, scale),
            _ => PackedMatrix::from_ref(m),
        }
    }
}

/// What is done with one matrix: conversions in order, then the precision of its inputs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Target {
    steps: Vec<Conversion>,
    activations: ActivationPrecision,
}

impl From<Conversion> for Target {
    fn from(step: Conversion) -> Self {
        let steps = if step == Conversion::Keep { Vec::new() } else { vec![step] };
        Self { steps, activations: ActivationPrecision::Native }
    }
}

impl Target {
    /// The same conversions with another precision of the inputs. Where the matrix does not end in a format that can have it,
    /// inputs stay native.
    #[must_use]
    pub fn with_activations(self, activations: ActivationPrecision) -> Self {
        Self { activations, ..self }
    }

    /// Leaves out conversions that would not change a matrix stored in this format.
    pub(super) fn simplified(mut self, stored: WeightFormat) -> Self {
        let mut format = stored;
        self.steps.retain(|step| {
            let before = format;
            format = step.result(before);
            !step.keeps(before)
        });
        self
    }

    /// This, then another.
    pub(super) fn then(mut self, next: Self) -> Self {
        self.steps.extend(next.steps);
        self.with_activations(next.activations)
    }

    /// The conversions.
    #[must_use]
    pub fn steps(&self) -> &[Conversion] {
        &self.steps
    }

    /// Whether the matrix stays entirely as it is.
    #[must_use]
    pub fn keeps(&self) -> bool {
        self.steps.is_empty() && self.activations == ActivationPrecision::Native
    }

    /// The format of a matrix afterwards.
    #[must_use]
    pub fn result(&self, stored: WeightFormat) -> WeightFormat {
        self.steps.iter().fold(stored, |format, step| step.result(format))
    }

    /// The precision of its inputs afterwards.
    #[must_use]
    pub fn activations(&self, stored: WeightFormat) -> ActivationPrecision {
        if self.activations.fits(self.result(stored)) { self.activations } else { ActivationPrecision::Native }
    }

    /// Converts a matrix that stays usable.
    ///
    /// # Errors
    /// Those of [`encode()`](crate::encode()) and [`bridge`].
    pub fn apply(&self, m: &PackedMatrix) -> Result<PackedMatrix> {
        match self.steps.split_first() {
            None => self.finish(m.clone()),
            Some((first, rest)) => self.rest(rest, first.apply_ref(&m.as_ref())?),
        }
    }

    /// Converts a matrix that is given away: nothing is copied where nothing changes.
    ///
    /// # Errors
    /// Those of [`encode()`](crate::encode()) and [`bridge`].
    pub fn apply_owned(&self, m: PackedMatrix) -> Result<PackedMatrix> {
        self.rest(&self.steps, m)
    }

    /// Converts a borrowed matrix, for example one expert of a fused tensor.
    ///
    /// # Errors
    /// Those of [`PackedMatrix::from_ref`], [`encode()`](crate::encode()) and [`bridge`].
    pub fn apply_ref(&self, m: &PackedRef<'_>) -> Result<PackedMatrix> {
        match self.steps.split_first() {
            None => self.finish(PackedMatrix::from_ref(m)?),
            Some((first, rest)) => self.rest(rest, first.apply_ref(m)?),
        }
    }

    fn rest(&self, steps: &[Conversion], m: PackedMatrix) -> Result<PackedMatrix> {
        self.finish(steps.iter().try_fold(m, |m, step| step.apply(m))?)
    }

    fn finish(&self, m: PackedMatrix) -> Result<PackedMatrix> {
        match self.activations {
            ActivationPrecision::Native => Ok(m),
            precision if precision.fits(m.format()) => m.with_activations(precision),
            _ => Ok(m),
        }
    }
}
