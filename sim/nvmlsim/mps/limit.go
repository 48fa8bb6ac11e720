package mps

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

const mib = 1 << 20

// Memory measured on an H200: of a server, and of a client's context.
const serverMemory = 66 * mib

// contextMemory returns the memory of a context with this number of
// multiprocessors. Measured: 72 MiB for 12, 145 for 32, 271 for 66, 514 for
// 132; a line fitted to these points.
func contextMemory(multiprocessors uint32) uint64 {
	return (28_000 + 3685*uint64(multiprocessors)) / 1000 * mib
}

// directMemory is the additional memory of a context without MPS.
const directMemory = 12 * mib

// portion returns the number of multiprocessors for a percentage: whole pairs,
// at least one pair (measured: 10 % of 132 are 12, 25 % 32, 50 % 66, 90 % 118).
func portion(multiprocessors uint32, percentage float64) uint32 {
	if percentage >= 100 {
		return multiprocessors
	}
	n := uint32(float64(multiprocessors)*percentage/100) / 2 * 2
	return min(max(n, 2), multiprocessors)
}

// parsePercentage accepts numbers above 0 and up to 100.
func parsePercentage(s string) (float64, bool) {
	p, err := strconv.ParseFloat(s, 64)
	return p, err == nil && p > 0 && p <= 100
}

// parseSize parses a number of bytes, or a number with K, M or G (powers of
// 1024).
func parseSize(s string) (uint64, bool) {
	digits := strings.TrimRight(strings.ToUpper(s), "BI")
	shift := 0
	for i, unit := range []string{"K", "M", "G"} {
		if rest, ok := strings.CutSuffix(digits, unit); ok {
			digits, shift = rest, 10*(i+1)
			break
		}
	}
	n, err := strconv.ParseUint(digits, 10, 64)
	return n << shift, err == nil && n <= math.MaxUint64>>shift
}

// said formats a limit as the daemon reports it: in the largest unit that gives
// at least 1, rounded down. 71513M is "69G" (measured).
func said(limit string) string {
	n, ok := parseSize(limit)
	if !ok {
		return limit
	}
	for i, unit := range []string{"G", "M", "K"} {
		if shift := 30 - 10*i; n>>shift > 0 {
			return fmt.Sprintf("%d%s", n>>shift, unit)
		}
	}
	return limit
}

// limits holds memory limits by device, as they were set: "0" → "3G". Only
// limits that name a device by its index take effect; others are ignored, as in
// the real MPS.
type limits map[string]string

// parseLimits reads CUDA_MPS_PINNED_DEVICE_MEM_LIMIT: "0=1G,1=2G". It skips
// invalid parts.
func parseLimits(s string) limits {
	l := limits{}
	for part := range strings.SplitSeq(s, ",") {
		if device, value, ok := strings.Cut(strings.TrimSpace(part), "="); ok {
			l[device] = value
		}
	}
	return l
}

// of returns the limit of a device; the largest number if there is none.
func (l limits) of(index int) uint64 {
	if n, ok := parseSize(l[strconv.Itoa(index)]); ok {
		return n
	}
	return math.MaxUint64
}

// clientLimit returns the limit of a client on a device: the lower one of the
// server's limit and its own. If its own doesn't name the device, the server's
// limit doesn't apply either (measured).
func clientLimit(server limits, own string, index int) uint64 {
	if own == "" {
		return server.of(index)
	}
	wanted := parseLimits(own).of(index)
	if wanted == math.MaxUint64 {
		return wanted
	}
	return min(wanted, server.of(index))
}

// clientPercentage returns the lower one of the server's percentage and the
// client's.
func clientPercentage(server float64, own string) float64 {
	if p, ok := parsePercentage(own); ok {
		return min(p, server)
	}
	return server
}
