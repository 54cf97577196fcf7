"""The words of the sample world: names and values, every one a single token of the reader."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


FIRST_NAMES = _words(
    """
    Anna Boris Clara David Elena Felix Greta Henry Irene Jonas Karen Louis Maria Nolan Olivia Peter
    Quentin Rosa Simon Tessa Ulrich Vera Walter Xenia Yusuf Zara Agnes Bruno Celia Dorian Edith Frank
    Gloria Hugo Ines Jasper Klara Leo Mina Oscar
    """
)
LAST_NAMES = _words(
    """
    Abbot Acker Adler Alcott Amsel Arkin Ashby Avery Baird Balint Barlow Baxter Becker Bellamy Benning
    Birch Blake Bolton Brandt Brewster Bristow Burke Cairns Calder Carver Chadwick Clayton Coburn Colby
    Conrad Corbett Craig Crosby Dalton Danvers Darrow Decker Delgado Denham Dixon Donovan Dorsey Draper
    Dunbar Eaton Eckhart Edgar Ellery Emmett Engel Erikson Everett Fairfax Farrell Fenton Fischer Flores
    Forbes Foster Fowler Freund Fuller Gable Galvin Garrett Gibbs Gifford Glover Gordon Grady Granger
    Greer Griffin Haber Hadley Hansen Harker Hartman Hawkins Hayden Heller Hendrix Herrera Hobbs
    Holloway Hooper Horvat Howell Huber Hurley Ibsen Ingram Irving Jablon Jansen Jarvis Jensen Jordan
    Kagan Kaplan Keating Keller Kendall Kern Kimball Kirby Klein Kovac Kramer Lambert Landis Larsen
    Lawson Lennox Lindgren Lombard Lowell Lucas Lynch Madsen Mallory Marlow Mercer Merritt Metcalf
    Milano Monroe Moreno Morton Murdoch Nadler Nash Neumann Newell Nielsen Novak Nyberg Oakley Obrien
    Odell Olsen Orwell Osborn Paley Parrish Pascal Paxton Pearson Pelham Perkins Petrov Pickett Porter
    Prescott Pruitt Quigley Quinn Radley Ramsey Randall Rankin Redford Reyes Ridley Rivera Roland Romano
    Rossi Rowan Rutter Salas Sanders Sawyer Schuster Seaton Sexton Shelby Sinclair Sloane Snyder Sorkin
    Spencer Stanton Sterling Stroud Sutton Talbot Tanner Tate Thayer Thorne Tilden Torres Tucker Turner
    Tyson Ullman Upton Vance Varga Vaughn Vinson Wagner Walden Warner Watkins Weaver Webster Weller
    Whitman Wilder Winslow Wolfe Wyatt Yardley Yates Yoder Zeller Ziegler Zimmer
    """
)
COMPANIES = _words(
    """
    Acmetron Alpivo Arcadon Astrelle Bluefern Borealis Brightex Calyptus Candoro Celestra Cobaltis
    Coralyn Crestova Dynamar Eastbrook Ecliptra Elmstone Emberlin Everlock Falconix Fernwell Firmado
    Fluxara Glenmark Goldray Gravion Halcyon Harborix Helionet Highmoor Icefield Indigon Ironbark
    Jetwind Juniperus Kestrelon Kronovo Lakemont Lumarix Lunaform Magnolix Marlinex Meridia Mistral
    Moonhill Nebulon Nordwell Novaline Oakbridge Octavian Opaline Orbitas Palmero Pinecrest Polarex
    Quantos Quillmore Ravenor Redstone Rivertex Sablefin Silverado Solarium Stonegate Sunvale Tidewell
    Timberon Topazia Tribeca Umbrella Vectoria Velora Verdana Westlight
    """
)
TOWNS = _words(
    """
    Aldermoor Ashcombe Bellport Blackwater Bramford Brightsea Caldwick Castlebay Cedarton Clearbrook
    Cranfield Dovermouth Dunhaven Eastmere Elmsworth Fairhaven Farnley Foxbury Glenrock Goldcrest
    Graywood Greenholm Harrowgate Hazelden Hillsborough Hollowell Ivybridge Kingsford Lakeshore
    Larkfield Longmeadow Maplewood Marshfield Millbrook Northgate Oldbury Orchardton Pebblebeach
    Queensbury Ravenswood Riverton Rosedale Saltmarsh Sandwick Shelburne Silverton Southport Springdale
    Stillwater Stonehaven Summerfield Thornbury Tidewater Vineyard Waterford Westbrook Whitecliff
    Wildwood Willowdale Windermere
    """
)
JOBS = _words(
    """
    baker teacher nurse farmer lawyer pilot tailor painter doctor gardener plumber dentist librarian
    chemist carpenter journalist cook driver mason barber
    """
)
LANGUAGES = _words(
    """
    French German Spanish Italian Polish Russian Greek Turkish Arabic Hindi Japanese Korean Swedish
    Danish Dutch Finnish Welsh Czech Persian Latin
    """
)
INSTRUMENTS = _words(
    """
    violin piano guitar flute trumpet cello drum harp clarinet banjo organ tuba oboe accordion saxophone
    mandolin ukulele trombone bassoon harmonica
    """
)
PETS = _words(
    """
    cat dog parrot rabbit hamster turtle goldfish canary pony goat lizard snake ferret duck goose pigeon
    donkey hedgehog spider frog
    """
)
FOODS = _words(
    """
    soup pasta rice pizza salad bread cheese fish curry pancakes noodles beans dumplings stew sushi pie
    porridge tacos lentils mushrooms
    """
)
COLLECTIBLES = _words(
    """
    stamps coins maps clocks shells postcards hats books spoons keys bottles masks stones toys lamps
    buttons medals records kites cameras
    """
)
PRODUCTS = _words(
    """
    shoes chairs bicycles paint glass paper soap batteries furniture tents mirrors carpets engines
    pencils windows blankets ropes bricks watches pumps
    """
)
MARKETS = _words(
    """
    Norway Spain Brazil Canada Japan India Egypt Kenya Chile Peru Italy France Poland Greece Turkey
    Mexico Iceland Ireland Portugal Vietnam
    """
)
YEARS = tuple(str(year) for year in range(1903, 2003, 5))
CARRIERS = _words(
    """
    train ship truck plane barge tram canoe wagon balloon van helicopter ferry sled motorcycle submarine
    bus rocket mule camel drone
    """
)
SPORTS = _words(
    """
    football tennis hockey rugby chess golf rowing cricket boxing fencing judo volleyball basketball
    swimming skiing sailing cycling archery wrestling badminton
    """
)
SIGNS = _words(
    """
    lion eagle bear wolf tiger fox owl whale dragon horse swan bull stag dolphin raven falcon beaver
    crane otter bee
    """
)
REGIONS = _words(
    """
    Arlonia Belmark Cordovia Drevany Estoria Fallmark Galdonia Hestland Istria Jorvia Kelmark Lorvania
    Marovia Norland Ostvany Pelonia Rudova Sarmania Tolvania Uldmark
    """
)
LANDMARKS = _words(
    """
    bridge castle lighthouse museum theatre tower cathedral stadium palace windmill library aquarium
    monastery fort harbor garden fountain temple observatory zoo
    """
)
RIVERS = _words(
    """
    Arno Bourne Cressa Dellen Esk Fenna Garonne Hella Isar Jarra Kessel Loire Moldau Neva Orla Pegnitz
    Rhine Severn Tamar Ural
    """
)
CROPS = _words(
    """
    apples grapes wheat barley olives potatoes tomatoes cherries lemons plums onions carrots hops pears
    peaches cabbages melons almonds oats tulips
    """
)
FESTIVALS = _words(
    """
    music film dance poetry lantern wine flower puppet jazz comedy boat snow fire mask cider honey opera
    circus pumpkin sword
    """
)
MATERIALS = _words(
    """
    wood marble granite copper iron steel concrete clay slate timber sandstone bronze brass limestone
    straw bamboo silver flint chalk plaster
    """
)
