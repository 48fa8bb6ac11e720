//go:build race

package supervisor

const raced = true
