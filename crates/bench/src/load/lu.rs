//! LU factorization with partial pivoting, as Linpack does it: right-looking, by blocks of columns, on a
//! matrix of doubles stored by rows. A block of columns touches every row, which is a strided walk. The
//! update of the rest touches every page in order, and writes it.

use super::Settings;
use super::region::PAGE_BYTES;
use crate::measure::Random;
use serde_json::{Value, json};
use std::time::Instant;

/// Columns of a block. An update then does 32,000 multiplications for each page: 10 µs of work, against the
/// 60 µs that an area takes to read a page. Linpack's users choose 32 to 256 columns.
const BLOCK: usize = 64;

/// Factors a matrix that fills `bytes`, and compares P·A·x with L·U·x.
pub fn lu(settings: &Settings) -> Result<Value, String> {
    let n = ((settings.bytes / 8) as f64).sqrt() as usize;
    let mut matrix = Matrix::random(n, settings.seed);
    let began = Instant::now();
    let pivots = matrix.factor();
    let seconds = began.elapsed().as_secs_f64();
    let residual = matrix.residual(&pivots, settings.seed);
    // Linpack's own limit. A wrong page gives 10^12 or more, or NaN.
    if residual.is_nan() || residual > 16.0 {
        return Err(format!("the factors of a matrix of {n} rows are wrong: residual {residual}"));
    }
    Ok(json!({
        "pid": std::process::id(),
        "rows": n,
        "pages": n * n * 8 / PAGE_BYTES,
        "seconds": seconds,
        "residual": residual,
        "digest": format!("{:016x}", matrix.digest()),
    }))
}

/// A square matrix, row after row.
struct Matrix {
    n: usize,
    cells: Vec<f64>,
}

/// Returns a row of the original matrix, from the seed alone.
fn original(n: usize, row: usize, seed: u64) -> impl Iterator<Item = f64> {
    let mut random = Random::new(seed ^ (row as u64 + 1) << 24);
    (0..n).map(move |_| (random.next() >> 11) as f64 / (1_u64 << 53) as f64 - 0.5)
}

impl Matrix {
    fn random(n: usize, seed: u64) -> Matrix {
        let mut cells = Vec::with_capacity(n * n);
        (0..n).for_each(|row| cells.extend(original(n, row, seed)));
        Matrix { n, cells }
    }

    fn row(&self, row: usize) -> &[f64] {
        &self.cells[row * self.n..][..self.n]
    }

    /// Replaces the matrix by L and U. Returns, for each step, the row that was exchanged with the step's
    /// row.
    fn factor(&mut self) -> Vec<usize> {
        let mut pivots = Vec::with_capacity(self.n);
        for first in (0..self.n).step_by(BLOCK) {
            let end = (first + BLOCK).min(self.n);
            self.factor_block(first, end, &mut pivots);
            self.solve_rows(first, end);
            self.update_rest(first, end);
        }
        pivots
    }

    /// Factors the columns `first..end` below row `first`. The columns are copied first, as Linpack does,
    /// because each of their rows lies in a page of its own. Rows are exchanged whole.
    fn factor_block(&mut self, first: usize, end: usize, pivots: &mut Vec<usize>) {
        let (n, width) = (self.n, end - first);
        let mut block: Vec<f64> = Vec::with_capacity((n - first) * width);
        (first..n).for_each(|row| block.extend_from_slice(&self.row(row)[first..end]));
        for column in 0..width {
            let size = |row: &usize| block[row * width + column].abs();
            let pivot = (column..n - first).max_by(|a, b| size(a).total_cmp(&size(b))).unwrap_or(column);
            pivots.push(first + pivot);
            if pivot != column {
                let (upper, lower) = block.split_at_mut(pivot * width);
                upper[column * width..][..width].swap_with_slice(&mut lower[..width]);
            }
            let (upper, lower) = block.split_at_mut((column + 1) * width);
            let top = &upper[column * width..];
            for row in lower.chunks_exact_mut(width) {
                row[column] /= top[column];
                let factor = row[column];
                row[column + 1..]
                    .iter_mut()
                    .zip(&top[column + 1..])
                    .for_each(|(cell, top)| *cell -= factor * top);
            }
        }
        for (row, pivot) in pivots[first..].iter().enumerate() {
            self.exchange(first + row, *pivot);
        }
        for (row, cells) in block.chunks_exact(width).enumerate() {
            self.cells[(first + row) * n + first..][..width].copy_from_slice(cells);
        }
    }

    fn exchange(&mut self, above: usize, below: usize) {
        if above != below {
            let (upper, lower) = self.cells.split_at_mut(below * self.n);
            upper[above * self.n..][..self.n].swap_with_slice(&mut lower[..self.n]);
        }
    }

    /// Computes U to the right of the block: each row of the block, minus the contributions of the block's
    /// rows above it.
    fn solve_rows(&mut self, first: usize, end: usize) {
        for row in first + 1..end {
            let (above, rest) = self.cells.split_at_mut(row * self.n);
            let (factors, cells) = rest[..self.n].split_at_mut(end);
            subtract(cells, &factors[first..row], |k| &above[(first + k) * self.n + end..][..self.n - end]);
        }
    }

    /// Updates the rest, below and to the right: each row minus the block's rows times the row's factors.
    fn update_rest(&mut self, first: usize, end: usize) {
        let (above, below) = self.cells.split_at_mut(end * self.n);
        for row in below.chunks_exact_mut(self.n) {
            let (factors, cells) = row.split_at_mut(end);
            subtract(cells, &factors[first..], |k| &above[(first + k) * self.n + end..][..self.n - end]);
        }
    }

    /// Returns |P·A·x - L·U·x| in units of rounding errors, for a random x. The scale is Linpack's. Every
    /// cell of L and U contributes.
    fn residual(&self, pivots: &[usize], seed: u64) -> f64 {
        let n = self.n;
        let x: Vec<f64> = original(n, n, seed).collect();
        let times_u = |row: usize| dot(&self.row(row)[row..], &x[row..]);
        let ux: Vec<f64> = (0..n).map(times_u).collect();
        let mut order: Vec<usize> = (0..n).collect();
        pivots.iter().enumerate().for_each(|(row, pivot)| order.swap(row, *pivot));
        let (mut worst, mut norm) = (0.0_f64, 0.0_f64);
        for row in 0..n {
            let lux = dot(&self.row(row)[..row], &ux[..row]) + ux[row];
            let (mut ax, mut sum) = (0.0, 0.0);
            for (cell, x) in original(n, order[row], seed).zip(&x) {
                ax += cell * x;
                sum += cell.abs();
            }
            // A maximum would lose a NaN.
            let difference = (ax - lux).abs();
            worst = if difference <= worst { worst } else { difference };
            norm = norm.max(sum);
        }
        worst / (norm * 0.5 * n as f64 * f64::EPSILON)
    }

    /// Returns a digest of all bits, which is the same with and without a budget.
    fn digest(&self) -> u64 {
        self.cells
            .iter()
            .fold(0, |sum, cell| (sum ^ cell.to_bits()).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29))
    }
}

fn dot(left: &[f64], right: &[f64]) -> f64 {
    left.iter().zip(right).map(|(left, right)| left * right).sum()
}

/// Subtracts the sum of `factors[k] * row(k)` from `cells`. Four rows are handled at once, so that each cell
/// is loaded and stored once for four multiplications.
fn subtract<'r>(cells: &mut [f64], factors: &[f64], row: impl Fn(usize) -> &'r [f64]) {
    let count = cells.len();
    let fours = factors.len() / 4 * 4;
    for k in (0..fours).step_by(4) {
        let [a, b, c, d] = [row(k), row(k + 1), row(k + 2), row(k + 3)].map(|row| &row[..count]);
        let [fa, fb, fc, fd] = [factors[k], factors[k + 1], factors[k + 2], factors[k + 3]];
        for at in 0..count {
            cells[at] -= fa * a[at] + fb * b[at] + (fc * c[at] + fd * d[at]);
        }
    }
    for (k, factor) in factors.iter().enumerate().skip(fours) {
        cells.iter_mut().zip(row(k)).for_each(|(cell, other)| *cell -= factor * other);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn factors_multiply_to_the_matrix_with_its_rows_exchanged() {
        // One row, less than a block, one block, one block and a row, several blocks.
        for n in [1, 7, BLOCK, BLOCK + 1, 3 * BLOCK + 5] {
            let mut matrix = Matrix::random(n, 5);
            let pivots = matrix.factor();
            let mut order: Vec<usize> = (0..n).collect();
            pivots.iter().enumerate().for_each(|(row, pivot)| order.swap(row, *pivot));
            for (row, old_row) in order.into_iter().enumerate() {
                for (column, wanted) in original(n, old_row, 5).enumerate() {
                    let l = |k: usize| if k == row { 1.0 } else { matrix.row(row)[k] };
                    let found: f64 = (0..=row.min(column)).map(|k| l(k) * matrix.row(k)[column]).sum();
                    assert!((found - wanted).abs() < 1e-12, "{n}: {row}, {column}: {found} and {wanted}");
                }
            }
            assert!(matrix.residual(&pivots, 5) < 1.0);
        }
    }

    #[test]
    fn one_wrong_cell_is_found() {
        let mut matrix = Matrix::random(100, 1);
        let pivots = matrix.factor();
        let digest = matrix.digest();
        for at in [0, 4711, 9_999] {
            let cell = std::mem::replace(&mut matrix.cells[at], 0.123);
            let residual = matrix.residual(&pivots, 1);
            assert!(residual.is_nan() || residual > 1e6, "{at}: {residual}");
            assert_ne!(matrix.digest(), digest);
            matrix.cells[at] = cell;
        }
    }

    #[test]
    fn load_says_how_large_the_matrix_is_and_that_it_is_right() {
        let result = lu(&Settings { bytes: 8 * 64 * 64, ..Settings::default() }).unwrap();
        assert_eq!(result["rows"], 64);
        assert!(result["residual"].as_f64() < Some(1.0), "{result}");
    }
}
