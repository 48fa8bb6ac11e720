// Package controltest has the API server and the objects that tests of the controller's packages
// share.
package controltest
