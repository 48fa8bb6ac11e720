// Package bootid reads the ID of the running kernel's boot.
package bootid

import (
	"fmt"
	"os"
	"strings"
)

// file has an ID that differs for each boot of the kernel.
const file = "/proc/sys/kernel/random/boot_id"

// Read returns the boot ID.
func Read() (string, error) {
	id, err := os.ReadFile(file)
	if err != nil {
		return "", fmt.Errorf("read the boot ID: %w", err)
	}
	return strings.TrimSpace(string(id)), nil
}
