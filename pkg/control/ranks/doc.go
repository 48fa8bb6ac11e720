// Package ranks keeps the taints of Nodes equal to their ranks (pkg/rank), or removes them again.
// Taints of others stay as they are. Nothing is written while no rank changes.
package ranks
