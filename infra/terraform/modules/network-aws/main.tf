# A pool's own VPC over two zones. Public: machines have addresses. Private: a NAT gateway leads out, nothing leads in.

terraform {
  required_version = ">= 1.11"
  required_providers {
    aws = { source = "hashicorp/aws", version = ">= 5.100, < 7.0" }
  }
}

variable "name" {
  description = "Name of the pool."
  type        = string
}

variable "cidr" {
  description = "Private range of the network, /22 or larger."
  type        = string
}

variable "public" {
  description = "Whether the pool's machines have public addresses."
  type        = bool
}

variable "tags" {
  description = "Tags of every resource."
  type        = map(string)
}

locals {
  subnets = merge(
    { public-a = { zone = 0, public = true } },
    var.public ? { public-b = { zone = 1, public = true } } : {
      private-a             = { zone = 0, public = false }
      private-b             = { zone = 1, public = false }
    },
  )
}

data "aws_availability_zones" "this" {
  state = "available"
  filter {
    name   = "opt-in-status" # no local zones
    values = ["opt-in-not-required"]
  }
}

resource "aws_vpc" "this" {
  cidr_block           = var.cidr
  enable_dns_hostnames = true
  tags                 = merge(var.tags, { Name = var.name })
}

resource "aws_default_security_group" "this" { # nothing belongs to it, and it lets nothing through
  vpc_id = aws_vpc.this.id
  tags   = merge(var.tags, { Name = "${var.name}-unused" })
}

resource "aws_internet_gateway" "this" {
  vpc_id = aws_vpc.this.id
  tags   = merge(var.tags, { Name = var.name })
}

resource "aws_subnet" "this" {
  for_each                = local.subnets
  vpc_id                  = aws_vpc.this.id
  cidr_block              = cidrsubnet(var.cidr, 2, index(keys(local.subnets), each.key))
  availability_zone       = data.aws_availability_zones.this.names[each.value.zone]
  map_public_ip_on_launch = var.public
  tags                    = merge(var.tags, { Name = "${var.name}-${each.key}" })
}

resource "aws_eip" "nat" {
  count  = var.public ? 0 : 1
  domain = "vpc"
  tags   = merge(var.tags, { Name = var.name })
}

resource "aws_nat_gateway" "this" { # one: a site that loses its zone is a site lost, and the gateways route round it
  count         = var.public ? 0 : 1
  allocation_id = aws_eip.nat[0].id
  subnet_id     = aws_subnet.this["public-a"].id
  tags          = merge(var.tags, { Name = var.name })
  depends_on    = [aws_internet_gateway.this]
}

resource "aws_route_table" "this" {
  for_each = toset([for subnet in local.subnets : subnet.public ? "public" : "private"])
  vpc_id   = aws_vpc.this.id
  tags     = merge(var.tags, { Name = "${var.name}-${each.key}" })
}

resource "aws_route" "out" {
  for_each               = aws_route_table.this
  route_table_id         = each.value.id
  destination_cidr_block = "0.0.0.0/0"
  gateway_id             = each.key == "public" ? aws_internet_gateway.this.id : null
  nat_gateway_id         = each.key == "private" ? aws_nat_gateway.this[0].id : null
}

resource "aws_route_table_association" "this" {
  for_each       = aws_subnet.this
  subnet_id      = each.value.id
  route_table_id = aws_route_table.this[local.subnets[each.key].public ? "public" : "private"].id
}

output "network" {
  description = "The network as pool modules report it: its id, the subnets that machines go into, and its route tables."
  value = {
    id      = aws_vpc.this.id
    subnets = [for key, subnet in local.subnets : aws_subnet.this[key].id if subnet.public == var.public]
    routes  = [for table in aws_route_table.this : table.id]
  }
  depends_on = [aws_route.out, aws_route_table_association.this] # a machine that boots too early finds no way out
}
