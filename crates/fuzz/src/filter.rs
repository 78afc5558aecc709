//! The evaluator of seccomp filters against an interpreter that runs one call at a time. A call that is
//! reported as allowed must be allowed for every value of the unknown parts.

use crate::Input;
use farpage_core::filter::{Call, Evaluator, INSTRUCTIONS_MAX, Instruction, is_valid};

/// The architecture that a filter sees.
const X86_64: u32 = 0xc000_003e;
/// Instruction codes that Linux accepts, and two that Linux refuses.
const CODES: [u16; 42] = [
    0x20, 0x20, 0x20, 0x80, 0x81, 0x00, 0x01, 0x60, 0x61, 0x02, 0x03, 0x06, 0x16, 0x07, 0x87, 0x84, 0x05,
    0x15, 0x15, 0x1d, 0x25, 0x2d, 0x35, 0x3d, 0x45, 0x4d, 0x04, 0x0c, 0x14, 0x1c, 0x24, 0x2c, 0x34, 0x3c,
    0x44, 0x4c, 0x54, 0x5c, 0x64, 0x74, 0xa4, 0x94,
];
const ANSWERS: [u32; 6] = [0x7fff_0000, 0x7fff_0000, 0x7ffc_0001, 0x8000_0000, 0x0005_0001, 0];

fn any_instruction(input: &mut Input, left: usize) -> Instruction {
    let code = CODES[input.below(CODES.len())];
    let way = |input: &mut Input| input.below(left.clamp(1, 4)) as u8;
    let (if_true, if_false) = (way(input), way(input));
    let k = match code {
        0x20 => 4 * input.below(17) as u32,
        0x60 | 0x61 | 0x02 | 0x03 => input.below(4) as u32,
        0x06 => ANSWERS[input.below(ANSWERS.len())],
        0x05 => input.below(4) as u32,
        0x00 | 0x01 if input.byte() < 128 => ANSWERS[input.below(ANSWERS.len())],
        _ => input.below(40) as u32,
    };
    Instruction { code, if_true, if_false, k }
}

/// Returns the answer of a filter to one call. `None` means that the kernel's behaviour isn't documented.
fn answer(program: &[Instruction], data: &[u32; 16]) -> Option<u32> {
    let (mut a, mut x, mut words, mut at) = (0_u32, 0_u32, [0_u32; 16], 0);
    loop {
        let Instruction { code, if_true, if_false, k } = program[at];
        at += 1;
        let operand = if code & 8 != 0 { x } else { k };
        let mut jump = |holds: bool| at += usize::from(if holds { if_true } else { if_false });
        match code {
            0x20 => a = data[k as usize / 4],
            0x80 => a = 64,
            0x81 => x = 64,
            0x00 => a = k,
            0x01 => x = k,
            0x60 => a = words[k as usize],
            0x61 => x = words[k as usize],
            0x02 => words[k as usize] = a,
            0x03 => words[k as usize] = x,
            0x06 => return Some(k),
            0x16 => return Some(a),
            0x07 => x = a,
            0x87 => a = x,
            0x84 => a = 0_u32.wrapping_sub(a),
            0x05 => at += k as usize,
            0x15 | 0x1d => jump(a == operand),
            0x25 | 0x2d => jump(a > operand),
            0x35 | 0x3d => jump(a >= operand),
            0x45 | 0x4d => jump(a & operand != 0),
            0x04 | 0x0c => a = a.wrapping_add(operand),
            0x14 | 0x1c => a = a.wrapping_sub(operand),
            0x24 | 0x2c => a = a.wrapping_mul(operand),
            0x34 | 0x3c if operand == 0 => return Some(0),
            0x34 | 0x3c => a /= operand,
            0x44 | 0x4c => a |= operand,
            0x54 | 0x5c => a &= operand,
            0xa4 | 0xac => a ^= operand,
            0x64 | 0x6c if operand < 32 => a <<= operand,
            0x74 | 0x7c if operand < 32 => a >>= operand,
            _ => return None,
        }
    }
}

/// Checks a filter with a partly known call, and with 16 calls that match it.
pub fn run(input: &mut Input) {
    let length = 1 + input.below(24);
    let mut program: Vec<_> = (0..length).map(|at| any_instruction(input, length - at)).collect();
    if input.byte() < 250 {
        program.push(Instruction { code: 0x06, k: ANSWERS[input.below(2)], ..Instruction::default() });
    }
    assert!(program.len() <= INSTRUCTIONS_MAX);
    if !is_valid(&program, &mut vec![0; program.len()]) {
        return;
    }
    let mut call = Call::any(input.below(40) as u32);
    let known = input.byte();
    for (at, argument) in call.arguments.iter_mut().enumerate() {
        *argument = (known & 1 << at != 0).then(|| input.below(40) as u64);
    }
    let mut evaluator = Box::new(Evaluator::new());
    let is_allowed = evaluator.allows(&program, &call);
    assert_eq!(is_allowed, evaluator.allows(&program, &call), "the memory of the last time matters");
    let may_be_allowed = evaluator.may_allow(&program, &call);
    let looks_at_what_is_not_known = program.iter().any(|instruction| {
        let offset = instruction.k as usize;
        let unknown = |offset: usize| offset < 16 || call.arguments[(offset - 16) / 8].is_none();
        instruction.code == 0x20 && offset >= 8 && unknown(offset)
    });
    for _ in 0..16 {
        let mut data = [0_u32; 16];
        (data[0], data[1], data[2], data[3]) = (call.number, X86_64, input.below(40) as u32, input.word());
        for (at, argument) in call.arguments.iter().enumerate() {
            let value = argument.unwrap_or(input.below(40) as u64);
            (data[4 + 2 * at], data[5 + 2 * at]) = (value as u32, (value >> 32) as u32);
        }
        let found = answer(&program, &data);
        let makes = found.is_some_and(|answer| matches!(answer >> 16, 0x7fff | 0x7ffc));
        assert!(may_be_allowed || !makes, "it allows {data:?}: {program:?}");
        assert!(!is_allowed || makes || found.is_none(), "it forbids {data:?}: {program:?}");
        if !looks_at_what_is_not_known && found.is_some() {
            assert_eq!(is_allowed, makes, "all is known of {data:?}: {program:?}");
        }
    }
}
